#!/usr/bin/env bash
# The checks of the text that need tools from PyPI: layout (clang-format) and spelling (codespell). The rest of the static
# checks (check_layers.py, check_headers.py) run in ctest without them. Changes nothing; `--fix` lays the sources out.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=${BATON_TOOLS:-build/venv/bin}
fix=no
[ "${1:-}" != --fix ] || fix=yes

for tool in clang-format codespell; do
    if [ ! -x "$bin/$tool" ]; then
        echo "skipped: $bin/$tool is not there (tests/run.sh installs it)"
        exit 77
    fi
done

mapfile -t sources < <(git ls-files '*.c' '*.h' '*.cu')
if [ "$fix" = yes ]; then
    "$bin/clang-format" -i "${sources[@]}"
else
    "$bin/clang-format" --dry-run -Werror "${sources[@]}" 2>&1 | head -n 40
    [ "${PIPESTATUS[0]}" = 0 ]
fi
mapfile -t texts < <(git ls-files '*.c' '*.h' '*.md' '*.py' '*.sh' '*.cmake' '*.txt' '*.proto' ':!tests/golden' ':!tests/fuzz/corpus' ':!bench/text')
"$bin/codespell" --ignore-words-list=ue,ot,ser,nd,te,hist,inout,statics,caf,hel,pres,ist "${texts[@]}"
