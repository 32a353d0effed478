"""The questions about a node: one fragment of a script, read only.

Programs that may take their time are started together and read one after the other, each with a limit; nothing is
written to the node, not even a temporary file.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from spark_core.facts.answer import STATUS_MARK
from spark_core.facts.containers import CONTAINERS_FORMAT
from spark_core.facts.disks import PATH_MARK
from spark_core.facts.docker import ANSWER_TIMEOUT_S
from spark_core.facts.gpu import APP_FIELDS, GPU_FIELDS
from spark_core.facts.listeners import listener_filter
from spark_core.transport.base import Fragment

PREFIX = "f:"
"""Of the names of the sections."""
_PATIENCE_S = ANSWER_TIMEOUT_S + 2

_SCRIPT = f"""
set +e +o pipefail # that a question has no answer is an answer
exec 2>/dev/null # what a program complains of is part of its answer, not of this script's
declare -A pipes
SECONDS=0
begin() {{ printf '\\n=== {PREFIX}%s\\n' "$1"; }}
finish() {{ printf '\\n{STATUS_MARK}%s\\n' "$1"; }}
limited() {{
  if command -v "$2" >/dev/null; then timeout -k 1 "$@" 2>&1 </dev/null; finish $?; else finish 127; fi
}}
ask() {{ local name=$1 fd; shift; exec {{fd}}< <(limited "$@" 2>&1); pipes[$name]=$fd; }}
# A program that a driver holds in the kernel does not even end when it is killed.
answer() {{
  local left=$(({_PATIENCE_S} - SECONDS))
  timeout $((left > 0 ? left : 1)) cat <&"${{pipes[$1]}}" || finish 124
}}
tell() {{ begin "$1"; answer "$1"; }}
show() {{
  local file
  begin "$1"; shift
  for file in "$@"; do
    if [ -e "$file" ]; then cat -- "$file" 2>&1; finish $?; return; fi
  done
  finish 127
}}
asked=$1 gpu=$2 ports=$3 programs=$4 paths=("${{@:6:$5}}"); shift $((5 + $5))

begin clock; printf '%s ' "$asked"; date +%s.%N
ask docker {ANSWER_TIMEOUT_S} docker info --format '{{{{json .}}}}'
ask containers {ANSWER_TIMEOUT_S} docker ps -a --no-trunc --format '{CONTAINERS_FORMAT}'
if [ "$gpu" = gpu ]; then
  ask gpus 8 nvidia-smi --query-gpu={",".join(GPU_FIELDS)} --format=csv,noheader,nounits
  ask gpu-processes 8 nvidia-smi --query-compute-apps={",".join(APP_FIELDS)} --format=csv,noheader,nounits
  next=$(readlink /boot/vmlinuz); next=${{next##*/vmlinuz-}}; next=${{next#vmlinuz-}}
  [ -n "$next" ] || next=$(cd /lib/modules && printf '%s\\n' * | sort -V | tail -n 1)
  ask next-boot 4 find "/lib/modules/$next" -name 'nvidia.ko*' -print -quit
fi
ask machine 5 uname -a
ask login 5 id
ask sudo 5 sudo -kn -l
ask remove-ipc 4 busctl --auto-start=no call org.freedesktop.login1 /org/freedesktop/login1 \
  org.freedesktop.DBus.Properties Get ss org.freedesktop.login1.Manager RemoveIPC
ask own-name 4 getent hosts "$HOSTNAME"
[ -z "$ports" ] || ask listeners 5 ss -Hltnpe "$ports"

tell machine
show os /etc/os-release
begin dgx; if [ -e /etc/dgx-release ]; then sed '/SERIAL/d' /etc/dgx-release 2>&1; finish $?; else finish 127; fi
show boot /proc/sys/kernel/random/boot_id
show product /sys/class/dmi/id/product_name
show memory /proc/meminfo
tell login; tell sudo; tell remove-ipc; tell own-name
begin logind
if [ -d /run/systemd/system ]; then
  grep -Hs '^[[:space:]]*RemoveIPC' /etc/systemd/logind.conf.d/*.conf /run/systemd/logind.conf.d/*.conf \
    /usr/lib/systemd/logind.conf.d/*.conf /etc/systemd/logind.conf /usr/lib/systemd/logind.conf
  finish $?
else finish 127; fi
begin clock-units
grep -lsE -e '(-lgc|--lock-gpu-clocks)' /etc/systemd/system/*.service; finish $?
begin locked-memory
pid=
for file in /run/docker.pid "${{XDG_RUNTIME_DIR:-/run}}/docker.pid"; do
  [ ! -r "$file" ] || [ -n "$pid" ] || read -r pid < "$file"
done
if [ -n "$pid" ] && [ -r "/proc/$pid/limits" ]; then
  grep -hE '^(Max locked memory|CapEff)' "/proc/$pid/limits" "/proc/$pid/status" 2>&1; finish $?
else finish 127; fi
begin present
for tool in python3 nvidia-ctk nvidia-container-runtime-hook; do
  ! command -v "$tool" >/dev/null || echo "$tool"
done
! grep -qs 'nvidia.com/gpu' /etc/cdi/* /var/run/cdi/* || echo nvidia-cdi
me=$(id -un); [ -z "$me" ] || [ ! -e "/var/lib/systemd/linger/$me" ] || echo linger
finish 0
# Those of root are not on the PATH of everybody.
begin programs; for name in $programs; do PATH=$PATH:/usr/sbin:/sbin type -P "$name" >/dev/null || echo "$name"; done
finish 0
begin sysctls; for name in "$@"; do [ -e "/proc/sys/${{name//.//}}" ] || echo "$name"; done; finish 0
held=
if [ -n "$ports" ]; then
  held=$(answer listeners); begin listeners; printf '%s\\n' "$held"
fi
if [ "$gpu" = gpu ]; then
  tell gpus
  busy=$(answer gpu-processes); begin gpu-processes; printf '%s\\n' "$busy"
  held+=$'\\n'$busy
  show driver /proc/driver/nvidia/version /sys/module/nvidia/version
  begin next-boot
  if [ -n "$next" ] && [ -d "/lib/modules/$next" ]; then printf '%s\\n' "$next"; answer next-boot
  else finish 127; fi
fi
begin groups
printf '%s\\n' "$held" | grep -oE '(^|pid=)[0-9]+' | sort -u | while read -r pid; do
  [ ! -r "/proc/${{pid#pid=}}/cgroup" ] || echo "${{pid#pid=}} $(tr '\\n' ' ' < "/proc/${{pid#pid=}}/cgroup")"
done
finish 0
engine=$(answer docker); begin docker; printf '%s\\n' "$engine"
tell containers
root='"DockerRootDir": ?"([^"]+)"'
if [[ $engine =~ $root ]]; then paths+=("${{BASH_REMATCH[1]}}"); fi
# There the daemon keeps images in containerd's folder and not in its own.
[[ $engine != *io.containerd.snapshotter* ]] || paths+=(/var/lib/containerd)
begin disks
for path in "${{paths[@]}}"; do
  printf '{PATH_MARK}%s\\n' "$path"
  while [ -n "$path" ] && [ ! -d "$path" ]; do path=${{path%/*}}; done
  timeout -k 1 4 df -P -B1 -- "${{path:-/}}" 2>&1
done
finish 0
begin clock; date +%s.%N; finish 0
"""


@dataclass(frozen=True)
class FactsSpec:
    """What to ask of a node.

    Args:
        paths: Paths whose disks matter; Docker's own folder is looked at in any case.
        ports: TCP ports whose holders matter.
        sysctls: Kernel parameters that must exist.
        gpu: Whether the node has a GPU to be asked about.
        programs: Programs that must be there.
    """

    paths: tuple[str, ...]
    ports: tuple[int, ...] = ()
    sysctls: tuple[str, ...] = ()
    gpu: bool = True
    programs: tuple[str, ...] = ()


def facts_fragment(spec: FactsSpec) -> Fragment:
    """The questions, with the controller's time in them; make it right before it is sent."""
    args = (
        f"{time.time():.6f}",
        "gpu" if spec.gpu else "",
        listener_filter(spec.ports),
        " ".join(spec.programs),
        str(len(spec.paths)),
        *spec.paths,
        *spec.sysctls,
    )
    return Fragment(_SCRIPT, args)
