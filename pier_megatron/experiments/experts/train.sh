# shellcheck shell=bash disable=SC2154
# Behind the lines that pier-megatron experts plan writes, which set what is not set here.

iteration_of() {
  cat "$folder/${names[$1]}/checkpoints/latest_checkpointed_iteration.txt" 2> /dev/null || echo 0
}

launch() {
  if [ "$nodes" = 1 ]; then
    "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$@"
    return
  fi
  mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  # When one node ends, well or not, the others have 2 minutes: a dead one does not hold the allocation.
  srun --kill-on-bad-exit=0 --wait=120 bash -c 'exec "$0" -m torch.distributed.run --node-rank "$SLURM_NODEID" "$@"' \
    "$python" --nnodes "$nodes" --nproc-per-node "$ranks" --master-addr "${hosts[0]}" \
    --master-port $((20000 + SLURM_JOB_ID % 20000)) "$@"
}

train() {
  local name=${names[$1]} arguments status lock
  # Held by this shell and the launcher.
  exec {lock}> "$folder/$name/lock" || return 1
  flock --nonblock --conflict-exit-code 75 "$lock"
  case $? in
    0) ;;
    75) echo "$name: another train.sh trains it" >&2; return 1 ;;
    *) echo "$name: not locked, flock does not work here: start no second train.sh" >&2 ;;
  esac
  # Another one may have trained it meanwhile.
  [ "$(iteration_of "$1")" != "${iterations[$1]}" ] || return 0
  echo "$name: started at iteration $(iteration_of "$1"), log in $folder/$name/log.txt"
  mapfile -t arguments < "$folder/$name/arguments.txt"
  launch -m pier_megatron --device "$device" "$script" "${arguments[@]}" < /dev/null >> "$folder/$name/log.txt" 2>&1
  status=$?
  echo "$name: ended with status $status at iteration $(iteration_of "$1") of ${iterations[$1]}"
  # One that ends well but early, on a signal or at the end of its time, is not trained either.
  [ "$status" = 0 ] && [ "$(iteration_of "$1")" = "${iterations[$1]}" ]
}

if [ ! -f "$folder/plan.json" ]; then
  echo "train.sh: there is no plan in $folder any more. Plan again" >&2
  exit 2
fi
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || set -- "$SLURM_ARRAY_TASK_ID"
[ $# -gt 0 ] || set -- "${!names[@]}"
left=()
for number in "$@"; do
  if ! [[ $number =~ ^[0-9]+$ && -n ${names[$number]:-} ]]; then
    echo "train.sh: $number: no such expert. There are 0 to $((${#names[@]} - 1))" >&2
    exit 2
  fi
  [ "$(iteration_of "$number")" = "${iterations[$number]}" ] || left+=("$number")
done
echo "$(($# - ${#left[@]})) of $# experts are trained"
[ ${#left[@]} -gt 0 ] || exit 0
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  train "$1"
  exit
fi
if [ "$nodes" != 1 ]; then
  echo "train.sh: an expert takes $nodes nodes. Submit it: sbatch $0" >&2
  exit 2
fi
[ "$device" = cpu ] || devices=${CUDA_VISIBLE_DEVICES-$devices}
IFS=, read -ra gpus <<< "$devices"
slots=$((${#gpus[@]} / ranks))
if [ $slots = 0 ]; then
  echo "train.sh: CUDA_VISIBLE_DEVICES shows ${#gpus[@]} devices, an expert takes $ranks" >&2
  exit 2
fi

# Each expert in a process group of its own: it is ended as a whole, and nobody else with it.
set -m
running=() failed=0
end_all() {
  for pid in "${running[@]}"; do
    kill -- "-$pid" 2> /dev/null
  done
  wait
  exit 130
}
trap end_all HUP INT TERM
reap() {
  # Ctrl-C would reach a sleep here, and not this script.
  wait -n
  for slot in "${!running[@]}"; do
    if ! kill -0 "${running[$slot]}" 2> /dev/null; then
      wait "${running[$slot]}" || failed=1
      unset "running[$slot]"
    fi
  done
}
for number in "${left[@]}"; do
  while [ ${#running[@]} = $slots ]; do
    reap
  done
  slot=0
  while [ -n "${running[$slot]:-}" ]; do
    slot=$((slot + 1))
  done
  (
    # It ends after what it has started, and says so.
    trap : HUP INT TERM
    if [ "$device" = cuda ]; then
      CUDA_VISIBLE_DEVICES=$(IFS=,; echo "${gpus[*]:slot * ranks:ranks}")
      export CUDA_VISIBLE_DEVICES
    fi
    train "$number"
  ) &
  running[slot]=$!
done
while [ ${#running[@]} -gt 0 ]; do
  reap
done
exit $failed
