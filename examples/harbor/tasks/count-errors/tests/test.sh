#!/bin/bash
if [ "$(tr -d '[:space:]' < /app/answer.txt)" = 8 ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
