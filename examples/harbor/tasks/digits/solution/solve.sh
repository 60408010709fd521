#!/bin/bash
echo 0123456789 > /app/answer.txt
