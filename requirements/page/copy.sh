#!/bin/sh
# Copies the page's libraries from node_modules, which `npm ci` filled and checked against the digests
# in package-lock.json, to services/orchestrator/extensions/page/vendor/. hooks.js names preact as a file beside
# it, because a browser knows no packages.
set -eu
cd "$(dirname "$0")"
npm ci --ignore-scripts --no-audit --no-fund
to=../../services/orchestrator/extensions/page/vendor
rm -rf "$to"
mkdir -p "$to"
from=node_modules
cp $from/preact/dist/preact.mjs "$to/preact.js"
sed 's|from"preact"|from"./preact.js"|' $from/preact/hooks/dist/hooks.mjs > "$to/hooks.js"
cp $from/htm/dist/htm.mjs "$to/htm.js"
cp $from/uplot/dist/uPlot.esm.js "$to/uplot.js"
cp $from/uplot/dist/uPlot.min.css "$to/uplot.css"
mkdir "$to/toml"
cp $from/smol-toml/dist/*.js "$to/toml/"
for name in preact htm uplot smol-toml; do cp $from/$name/LICENSE* "$to/$name.LICENSE.txt"; done
sed -i '/^\/\/# sourceMappingURL=/d' "$to"/*.js
# `tsc` takes their types from node_modules (tsconfig.json).
echo 'export * from "preact";' > "$to/preact.d.ts"
echo 'export * from "preact/hooks";' > "$to/hooks.d.ts"
echo 'export { default } from "htm";' > "$to/htm.d.ts"
echo 'export { default } from "uplot";' > "$to/uplot.d.ts"
echo 'export * from "smol-toml";' > "$to/toml/index.d.ts"
cd "$to"
sha256sum -- *.js *.css *.txt *.ts toml/* > SHA256SUMS
