#!/bin/sh
# Checks the types of the page's modules with `tsc`, part of `make check`. Needs npm and, the
# first time, its registry; without these the check is left out, and says so.
set -eu
cd "$(dirname "$0")"
if ! command -v npm >/dev/null; then
    echo "the types of the page's modules were not checked: there is no npm" >&2
    exit 0
fi
lock=node_modules/.package-lock.json
if [ ! -f $lock ] || [ package-lock.json -nt $lock ]; then
    if ! npm ci --ignore-scripts --no-audit --no-fund --silent; then
        echo "the types of the page's modules were not checked: npm could not install tsc" >&2
        exit 0
    fi
fi
node_modules/.bin/tsc -p .
