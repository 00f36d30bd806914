# What the scripts share that run in pieces of a few minutes; they source it once SECONDS_PER_PIECE is set.

# in_time COMMAND...: runs the command, and ends with code 3 if the piece's time is over before or while it runs.
in_time() {
  local left=$((SECONDS_PER_PIECE - SECONDS)) code=0
  ((left > 0)) || { echo 'out of time: run again'; exit 3; }
  timeout --signal=TERM --kill-after=60 "$left" "$@" || code=$?
  ((code == 0)) && return
  ((SECONDS >= SECONDS_PER_PIECE)) && { echo 'out of time: run again'; exit 3; }
  exit "$code"
}
