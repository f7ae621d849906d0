#!/bin/bash
# get.sh URL: prints what http://A.B.C.D:PORT/PATH has; fails if there is no such thing or nobody answers.
set -eu
rest=${1#http://}
address=${rest%%/*}
exec 3<>"/dev/tcp/${address%:*}/${address#*:}"
# Of this version: the answer ends with the connection.
printf 'GET /%s HTTP/1.0\r\nHost: %s\r\n\r\n' "${rest#*/}" "$address" >&3
read -r _ status _ <&3
while IFS= read -r line <&3 && [ "$line" != $'\r' ]; do :; done
[ "$status" = 200 ]
cat <&3
