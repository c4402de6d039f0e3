#!/bin/sh
# `make release`: makes dist/ of the commit that is checked out, and checks what is in it. Publishes
# nothing. The version is in pyproject.toml. docs/releases.md says what each file is for.
set -eu
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ -z "$(git status --porcelain)" ] || echo "release: files that are not committed have no part in it"

rm -rf dist
mkdir dist
git archive --format=tar.gz --prefix="hone-$version/" --output="dist/hone-$version-source.tar.gz" HEAD
tar -xzf "dist/hone-$version-source.tar.gz" -C "$work"
source=$work/hone-$version
"$bin/uv" build --quiet --out-dir dist "$source"
rm -f dist/.gitignore
wheel=$PWD/dist/hone_rl-$version-py3-none-any.whl
cyclonedx=cyclonedx-bom==7.5.0
for variant in cpu cuda; do
    "$bin/uvx" --quiet --from "$cyclonedx" cyclonedx-py requirements --output-reproducible \
        --output-file "dist/sbom-$variant.json" "$source/requirements/$variant.txt" 2>"$work/said" ||
        { cat "$work/said" >&2; exit 1; }
done
{
    echo "# Hone $version"
    awk -v version="$version" '/^## / { on = $2 == version; next } on' "$source/CHANGELOG.md"
} >"dist/RELEASE_NOTES.txt"
grep -q "^## $version (unreleased)" CHANGELOG.md && echo "release: CHANGELOG.md has no date for $version"
(cd dist && sha256sum -- * >SHA256SUMS)

if docker info >/dev/null 2>&1; then
    for file in compose.yaml compose.cpu.yaml; do
        TAG=$version docker compose --project-directory "$source" -f "$source/$file" build
    done
else
    echo "release: no Docker daemon answers, so no image was built; with one:"
    for file in compose.yaml compose.cpu.yaml; do
        echo "    TAG=$version docker compose -f $file build"
    done
fi

sh requirements/check_release.sh "$wheel" "$version"
ls -l dist
