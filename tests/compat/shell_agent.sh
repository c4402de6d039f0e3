#!/bin/sh
# Looks for the number in HONE_ROW by calls of a tool, with curl alone. The last line is the reward.
set -eu
secret=$(printf %s "$HONE_ROW" | sed 's/.*"secret": *\([0-9]*\).*/\1/')
number='{"type":"object","properties":{"number":{"type":"integer"}}}'
tools="[{\"type\":\"function\",\"function\":{\"name\":\"guess\",\"parameters\":$number}}]"
left=8
messages='{"role":"user","content":"Find the number."}'
for turn in 1 2 3 4 5 6 7 8; do
    answer=$(curl -sS --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
        -H "Authorization: Bearer $OPENAI_API_KEY" -H 'Content-Type: application/json' \
        -d "{\"model\":\"policy\",\"messages\":[$messages],\"tools\":$tools}") ||
        case $answer in *context_length_exceeded*) break ;; *) echo "$answer" >&2; exit 1 ;; esac
    message=$(printf %s "$answer" | sed -n 's/.*"message": *\({.*}\), *"finish_reason".*/\1/p')
    messages="$messages,$message"
    calls=$(printf %s "$message" | grep -o '"id": *"[^"]*"[^}]*}' || true)
    [ -n "$calls" ] || break
    calls=$(printf '%s\n' "$calls" | head -n "$left") # a turn may have many
    left=$((left - $(printf '%s\n' "$calls" | wc -l)))
    # in a subshell, so its results come back by what it prints
    results=$(printf '%s\n' "$calls" | while read -r call; do
        id=$(printf %s "$call" | sed 's/^"id": *"\([^"]*\)".*/\1/')
        guess=$(printf %s "$call" | sed 's/.*number[^0-9]*\([0-9]*\).*/\1/')
        said=correct
        [ "$guess" -ge "$secret" ] || said=higher
        [ "$guess" -le "$secret" ] || said=lower
        printf ',{"role":"tool","tool_call_id":"%s","content":"%s"}' "$id" "$said"
    done)
    case $results in *correct*) echo 1; exit ;; esac
    messages="$messages$results"
    [ "$left" -gt 0 ] || break
done
echo 0
