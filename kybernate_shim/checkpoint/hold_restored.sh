#!/bin/sh
# CRIU executes this at each step of a tenant's restore, as its action-script. Three of them are reported to the shim's
# daemon. At pre-restore the daemon begins to take CRIU out of the container's cgroup, so that the pod's limits cannot
# keep this script from being executed later; at post-restore that must be done. At pre-resume, when all processes have
# their final privileges and none has run yet, the daemon looks at them. CRIU ends the restore where the first two fail.
# It ignores the status of pre-resume, so that the processes are killed here. The pipes vanish with the daemon, and
# opening or reading them fails then. Of a dump, one step is reported: at post-dump, before CRIU ends the processes, the
# daemon completes the image; where it cannot, CRIU lets them continue.
case $CRTOOLS_SCRIPT_ACTION in
pre-restore | post-restore | pre-resume | post-dump) ;;
*) exit 0 ;;
esac
answer=
if echo "$CRTOOLS_SCRIPT_ACTION $PPID ${CRTOOLS_INIT_PID:-0}" >"$KYBERNATE_GATE_ASK"; then
    [ "$CRTOOLS_SCRIPT_ACTION" = pre-restore ] && exit 0
    read -r answer <"$KYBERNATE_GATE_ANSWER"
fi
[ "$answer" = pass ] && exit 0
[ "$CRTOOLS_SCRIPT_ACTION" = post-dump ] && exit 1
[ -z "$CRTOOLS_INIT_PID" ] || kill -KILL "$CRTOOLS_INIT_PID"
exit 1
