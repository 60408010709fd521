#!/bin/bash
# A graded reward, with more values beside it.
all=$(tr -d '\n' < /app/answer.txt | wc -c)
digits=$(tr -dc 0-9 < /app/answer.txt | wc -c)
reward=$(awk -v digits="$digits" -v all="$all" 'BEGIN { print all ? digits / all : 0 }')
echo "{\"reward\": $reward, \"letters\": $all}" > /logs/verifier/reward.json
