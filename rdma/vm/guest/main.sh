#!/bin/bash
# Runs in the virtual machine: main.sh TEST ... runs these tests, one after the other, and prints one line for each as
# the test runner does, and the logs of those that failed. The tests are functions of the same names in the files
# beside this one; see test.sh on the host for what is given in the environment.
set -uo pipefail
here=$(dirname "$0")
for file in "$here"/{cluster,jobs,faults,probe,hosts}.sh; do . "$file"; done

code=0
for test in "$@"; do
    number=$((${number:-0} + 1))
    # Not as a condition: that would switch `set -e` off in the test.
    check "$test"
    [ $? = 0 ] || code=1
done
[ ! -e "$work/master.pid" ] || kill -KILL "$(cat "$work/master.pid")"
exit $code
