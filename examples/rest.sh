#!/bin/sh
# Plain REST by curl, from any language's point of view: submit a job, follow its events, read its
# metrics, download its checkpoint. Needs a stack (`hone up`), curl and jq.
#
#     sh examples/rest.sh
#     MODEL=/models/tiny DATA=/data/gsm8k.jsonl STEPS=1 sh examples/rest.sh
#
# MODEL and DATA are paths on the orchestrator's machine, or names of the Hugging Face Hub.
set -eu
url=${HONE_ORCHESTRATOR_URL:-http://127.0.0.1:8000}
token="Authorization: Bearer ${HONE_TOKEN:-}" # a stack without HONE_TOKEN looks at none
folder=${FOLDER:-checkpoint}

job=$(jq -n \
    --arg model "${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}" --arg data "${DATA:-openai/gsm8k}" \
    --argjson steps "${STEPS:-10}" --argjson prompts "${PROMPTS:-8}" \
    --argjson tokens "${TOKENS:-256}" '{job: {
        name: "by-rest", $model, $steps,
        data: {
            train: $data, columns: {prompt: "question"},
            config: (if $data == "openai/gsm8k" then "main" else null end)
        },
        sampling: {prompts_per_step: $prompts, max_tokens: $tokens},
        rewards: [{grader: "math"}]
    }}')

# submits the job once, however often it is sent with this key
id=$(printf '%s' "$job" | curl -fsS -X POST "$url/v1/jobs" -H "$token" \
    -H "Content-Type: application/json" -H "Idempotency-Key: by-rest-$$-$(date +%s)" -d @- |
    jq -r .id)
echo "job: $id"

# shows its events as they happen; the stream ends with the job
curl -fsSN "$url/v1/jobs/$id/events" -H "$token" -H "Accept: text/event-stream" |
    sed -n 's/^data: //p' | jq -r '.message // empty'

curl -fsS "$url/v1/jobs/$id" -H "$token" | jq -r '"status: \(.status), step \(.step)"'
curl -fsS "$url/v1/jobs/$id/metrics" -H "$token" |
    jq -r '.rows[] | select(.metrics.reward) | "step \(.step): reward \(.metrics.reward), loss \(.metrics.loss)"'

# fetches its last checkpoint, as transformers loads it
step=$(curl -fsS "$url/v1/jobs/$id/checkpoints" -H "$token" | jq '.checkpoints[-1].step')
for name in $(curl -fsS "$url/v1/jobs/$id/checkpoints/$step" -H "$token" | jq -r '.files[].name'); do
    curl -fsS "$url/v1/jobs/$id/checkpoints/$step/files/$name" -H "$token" \
        --create-dirs -o "$folder/$name"
done
echo "checkpoint of step $step: $folder"
