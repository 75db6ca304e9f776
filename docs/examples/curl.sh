#!/usr/bin/env bash
# Submit a job, follow its events, go on behind the last one when the connection breaks: with nothing but curl.
#
#     MIDSENTENCE_URL=http://localhost:8710 bash curl.sh '{"prompt": "Once upon a time", "max_tokens": 300}'
#
# Each event's data goes to standard output, a line of JSON each, once. The id of an event is the number of tokens seen so far.
set -euo pipefail

url=${MIDSENTENCE_URL:-http://localhost:8710}
body=${1:-'{"prompt": "Once upon a time", "max_tokens": 300}'}
curl=(curl --silent --show-error --fail --no-buffer)
[ -z "${MIDSENTENCE_API_KEY:-}" ] || curl+=(--header "Authorization: Bearer $MIDSENTENCE_API_KEY")

# Sent again until it was answered: with its key it makes one job all the same.
key=$(cat /proc/sys/kernel/random/uuid)
made=$("${curl[@]}" --retry 60 --retry-delay 1 --retry-all-errors "$url/v1/jobs" \
  --header 'Content-Type: application/json' --header "Idempotency-Key: $key" --data "$body")
job=$(sed -n 's/.*"id":"\([^"]*\)".*/\1/p' <<<"$made")
echo "$job" >&2

last=0
while true; do
  id='' event='' data=''
  while IFS= read -r line; do
    case $line in
      'id: '*) id=${line#id: } ;;
      'event: '*) event=${line#event: } ;;
      'data: '*) data=${line#data: } ;;
      '') # An event counts once it is whole: a connection can break in the middle of a number.
        [ -z "$data" ] || printf '%s\n' "$data"
        last=${id:-$last}
        case $event in done | failed | cancelled) exit ;; esac
        id='' event='' data='' ;;
    esac
  done < <("${curl[@]}" --header "Last-Event-ID: $last" "$url/v1/jobs/$job/events")
  sleep 1 # the API was killed, or is about to end: another one starts
done
