#!/bin/bash
grep -c ERROR /data/app.log > /app/answer.txt
