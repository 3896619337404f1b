#!/bin/sh
# Drives clients of other people against a real server: sh tests/clients/run.sh [URL MODEL]
# Without an address it starts a server on a port of its own. It makes its environments under CLIENTS_DIR
# (/tmp/jaxserve-clients), and wants python3 with venv, node >= 20 and npm. PYTHON is the one that has jaxserve.
set -eu
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
folder=${CLIENTS_DIR:-/tmp/jaxserve-clients}
export LITELLM_LOCAL_MODEL_COST_MAP=True  # it would look for prices elsewhere

if [ ! -x "$folder/py/bin/python" ]; then
    "$python" -m venv "$folder/py"
    wanted='import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["clients"])'
    # shellcheck disable=SC2046  # one word each
    "$folder/py/bin/pip" install --quiet openai $("$folder/py/bin/python" -c "$wanted")
fi
if [ ! -d "$folder/node_modules/openai" ]; then
    npm install --silent --no-audit --no-fund --prefix "$folder" openai
fi
# A module is looked for beside the file that imports it.
cp tests/clients/try_openai.mjs "$folder/try_openai.mjs"

if [ $# -eq 2 ]; then
    url=$1 model=$2
else
    model=smollm2-135m
    log=$(mktemp)
    "$python" -m jaxserve serve "$model" --port 0 >"$log" 2>&1 &
    server=$!
    trap 'kill $server; rm -f "$log"' EXIT
    until url=$(sed -n 's/.*serving .* on \(http.*\)/\1/p' "$log") && [ -n "$url" ]; do
        kill -0 $server || { cat "$log"; exit 1; }
        sleep 1
    done
fi

for client in openai langchain litellm; do
    "$folder/py/bin/python" -m "tests.clients.try_$client" "$url" "$model"
done
(cd "$folder" && node try_openai.mjs "$url" "$model")
echo "all clients did what they should"
