# shellcheck shell=bash
# What job scripts for Slurm share; lies beside them, and they source it. docs/deploy.md has two of them, train.slurm is another.
#   grace SECONDS                      for #SBATCH --signal TERM@SECONDS: torchrun leaves its ranks as long to save. Ends the job
#                                      with status 2 if it has less time: the signal would end it as it starts
#   queue_again STATUS SAVE "$@"       queues the job again, or ends it
# STATUS of the job's step: 0, trained to the end; 2, refused; 3, saved and ended at the signal; any other, failed.
# TRIES: how often a job is queued again without a newer checkpoint in SAVE, 10 by default.

# One task of an array: SLURM_JOB_ID of one of them stands for all.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
job=${job:-${SLURM_JOB_ID:-}}
# Slurm looks at the time every half a minute, and sends the signal up to a minute early.
early=60

seconds_left() {
    local end
    # Sites have formats of their own.
    end=$(SLURM_TIME_FORMAT=standard squeue --noheader --jobs "$job" --format %e) && [[ -n $end ]] &&
        end=$(date --date "$end" +%s 2> /dev/null) || return 1
    echo $((end - $(date +%s)))
}

grace() {
    local left
    signal_at=$(($1 + early))
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$(($1 * 19 / 20))
    if [[ -z ${CHECK:-} ]] && left=$(seconds_left) && ((left <= signal_at)); then
        echo "again.sh: the job has $left s, and --signal TERM@$1 comes up to $early s early: it would end as it starts." \
            "Give it a longer --time, or a shorter --signal and grace." >&2
        exit 2
    fi
}

queue_again() {
    local status=$1 save=$2 left saved=0 tries times
    shift 2
    [[ -z ${CHECK:-} ]] && ((status != 0 && status != 2)) || exit "$status"
    if ((status == 3)); then
        if ! left=$(seconds_left) || ((left > ${signal_at:-0})); then
            echo "again.sh: saved and ended at a signal"
            exit 0
        fi
        echo "again.sh: the time is over"
    else
        echo "again.sh: failed with status $status" >&2
    fi
    # Where an elastic island saves; other tasks of arrays have folders of their own.
    if ((${SLURM_ARRAY_TASK_ID:-0} > 0)) && { [[ -d $save/islands ]] || grep -q -e --pier-island "$0"; }; then
        save+=/islands/$SLURM_ARRAY_TASK_ID
    fi
    mkdir -p "$save"
    tries=$save/tries-$job
    # It is empty where it was not written to its end.
    [[ ! -s $save/latest_checkpointed_iteration.txt ]] || saved=$(stat --format %Y "$save/latest_checkpointed_iteration.txt")
    if ((saved >= $(date +%s) - SECONDS)); then
        rm -f "$tries"
    else
        if echo "$(date --iso-8601=seconds) status $status" >> "$tries"; then
            times=$(wc -l < "$tries")
        else
            # On a full disk nothing is counted, except by Slurm, which counts all restarts.
            times=$((${SLURM_RESTART_COUNT:-0} + 1))
        fi
        if ((times > ${TRIES:-10})); then
            echo "again.sh: ended $times times without a newer checkpoint, not queued again: see $tries" >&2
            exit "$status"
        fi
        # torchrun reports 1 for a refusal as for any failure. At the end of its time the job has none left to ask.
        if ((status != 3)); then
            CHECK='pier-megatron doctor' bash "$0" "$@"
            case $? in
                1 | 2)
                    echo "again.sh: not queued again, because the job cannot start" >&2
                    exit 2
                    ;;
            esac
        fi
    fi
    echo "again.sh: job $job is queued again"
    scontrol requeue "$job"
    exit "$status"
}
