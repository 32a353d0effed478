"""Faults of a healthy pair, each with the one finding that it is told as.

A fault breaks one thing of a host, or one setting, and can be mended again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab.deployment import FABRIC, Deployment
from tests.lab.healthy import HOSTS, NETPLAN, NUMBERS, TWIN, configured, pretend_kernel
from tests.lab.watching import launcher

Edit = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        code: The kind of the finding.
        told: A pattern of the lines that tell it: where, and what was found.
        breaking: Shell text for the host's console.
        mending: Shell text that takes it back.
        elsewhere: Shell text for the console of the other host, after it.
        pretend: A tool or file of the host, the arguments that it is asked with (None: any), what it then says, and
            its exit status.
        edit: Changes the settings.
        lab: A command of the lab that breaks, and the one that mends.
        host: The host that it is made on.
        severity: How it is told.
        also: Other kinds that cannot be kept apart from it.
    """

    code: str
    told: str
    breaking: str = "true"
    mending: str = "true"
    elsewhere: str = "true"
    pretend: tuple[str, str | None, str, int] | None = None
    edit: Edit | None = None
    lab: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    host: str = "spark-b"
    severity: str = "error"
    also: tuple[str, ...] = ()

    @contextlib.contextmanager
    def made(self, deployment: Deployment) -> Iterator[None]:
        """The pair with this fault; mended at the end, whatever happens in between."""
        with contextlib.ExitStack() as mending:
            mending.callback(deployment.console, self.host, self.mending)
            deployment.console(self.host, self.breaking)
            deployment.console(next(host for host in HOSTS if host != self.host), self.elsewhere)
            if self.lab is not None:
                mending.callback(deployment.lab, *self.lab[1])
                deployment.lab(*self.lab[0])
            if self.pretend is not None:
                tool, arguments, output, status = self.pretend
                if tool == "uname":
                    mending.callback(pretend_kernel, deployment, self.host)
                mending.callback(deployment.lab, "pretend", self.host, tool, "--stop")
                given = deployment.home / "said"
                given.write_text(output)
                words = [] if arguments is None else [f"--arguments={arguments}"]
                deployment.lab("pretend", self.host, tool, str(given), f"--status={status}", *words)
            if self.edit is not None:
                mending.enter_context(configured(deployment, self.edit))
            yield


def setting(*path: Any, value: Any) -> Edit:
    """Sets one setting; numbers of the path are places in lists."""

    def edit(config: dict[str, Any]) -> None:
        place: Any = config
        for word in path[:-1]:
            place = place[word] if isinstance(place, list) else place.setdefault(word, {})
        place[path[-1]] = value

    return edit


def as_root(*edits: Edit) -> Edit:
    """Settings for which root is needed, together with the password that sudo asks for."""

    def edit(config: dict[str, Any]) -> None:
        for change in edits:
            change(config)
        config["ssh"]["sudo_password_file"] = str(Path(config["ssh"]["config_file"]).with_name("sudo_password"))

    return edit


def _third_interface(config: dict[str, Any], netdev: str) -> object:
    """Declares one more interface on each node."""
    return [
        node["fabric"].append({"netdev": netdev, "address": f"192.168.202.{NUMBERS[node['name']]}/24"})
        for node in config["nodes"]
    ]


def _other_ssh_config(config: dict[str, Any], line: str) -> str:
    """A copy of the lab's ssh_config in which one line comes before all others."""
    lab = Path(config["ssh"]["config_file"])
    copy = lab.with_name("ssh_config_of_a_test")
    copy.write_text(f"{line}\n{lab.read_text()}")
    return str(copy)


def _daemon_json(change: str) -> str:
    """Shell text that changes Docker's configuration and restarts it."""
    return f"""
cp /etc/docker/daemon.json /root/daemon.json
python3 - <<'END'
import json
path = "/etc/docker/daemon.json"
value = json.load(open(path))
{change}
json.dump(value, open(path, "w"))
END
systemctl reset-failed docker; systemctl restart docker
"""


_DAEMON_JSON_BACK = (
    "mv /root/daemon.json /etc/docker/daemon.json; systemctl reset-failed docker; systemctl restart docker"
)
_RESTART_SSHD = "systemctl reset-failed ssh; systemctl restart ssh"
_LOG_OUT = "loginctl terminate-user spark 2>/dev/null || true"
"""Ends the connection that an earlier run has left open for a minute."""
_MEMORY = "sed '{change}' /proc/meminfo > /root/meminfo; mount --bind /root/meminfo /proc/meminfo"
_MEMORY_BACK = "umount /proc/meminfo; rm /root/meminfo"
_LISTEN = """
systemd-run -q --unit=holder python3 -c '{program}'
for _ in $(seq 50); do ss -Hltn | grep -q ':{port} ' && break; sleep 0.1; done
"""
_HANGING_UP = 'import socket; s = socket.create_server(("", 22)); [s.accept()[0].close() for _ in iter(int, 1)]'
_HOLDING = 'import socket, time; s = socket.create_server(("", 30000)); time.sleep(600)'
_CLASSES = """
umount -l /sys/class; cd /usr/share/spark-lab/class; {change}
mount -t overlay overlay -o ro,lowerdir=/usr/share/spark-lab/class:/sys/class /sys/class
"""
_HCA = "/usr/share/spark-lab/class/infiniband/rocep1s0f1/ports/1"
_NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
    "driver is installed and running.\n"
)
_DOCKER_INFO = (
    '{"ServerVersion": "99.2.1", "Driver": "overlay2", "CgroupDriver": "cgroupfs", "DockerRootDir": "/var/lib/docker", '
    '"Runtimes": {"nvidia": {}, "runc": {}}, "DefaultRuntime": "runc"}\n'
)
_KERNEL = "Linux {host} {release} #14-Ubuntu SMP PREEMPT_DYNAMIC Tue Mar 3 12:00:00 UTC 2026 {machine} GNU/Linux\n"

REACHING = [
    Fault(
        "connect-failed",
        r"spark-b, connect \(TCP\): expected sshd at \S+ port 22, found: connection refused",
        f"systemctl stop ssh; {_LOG_OUT}",
        "systemctl reset-failed ssh; systemctl start ssh",
    ),
    Fault(
        "key-exchange-failed",
        r"spark-b, key exchange: ",
        f"systemctl stop ssh; {_LOG_OUT}\n" + _LISTEN.format(program=_HANGING_UP, port=22),
        "systemctl stop holder; systemctl reset-failed ssh; systemctl start ssh",
    ),
    Fault(
        "host-key-mismatch",
        r"spark-b, host key.*: expected .*SHA256:\S+.*found .*SHA256:\S+",
        "cp -a /etc/ssh/ssh_host_ed25519_key* /root/; rm /etc/ssh/ssh_host_ed25519_key*\n"
        f"ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key; {_RESTART_SSHD}; {_LOG_OUT}",
        f"mv /root/ssh_host_ed25519_key* /etc/ssh/; {_RESTART_SSHD}",
    ),
    Fault(
        "host-key-unpinned",
        r"spark-\w, host key \(nodes\[\]\.host_key\): expected a pinned host key for \S+, found none .*SHA256:\S+",
        edit=lambda config: config["ssh"].update(config_file=_other_ssh_config(config, "UserKnownHostsFile /dev/null")),
    ),
    Fault(
        "authentication-failed",
        r"spark-b, authentication: expected a login as spark",
        f"mv /home/spark/.ssh/authorized_keys /home/spark/.ssh/away; {_LOG_OUT}",
        "mv /home/spark/.ssh/away /home/spark/.ssh/authorized_keys",
    ),
    Fault(
        "session-refused",
        r"spark-b, ",
        f"echo 'MaxSessions 0' > /etc/ssh/sshd_config.d/test.conf; {_RESTART_SSHD}; {_LOG_OUT}",
        f"rm -f /etc/ssh/sshd_config.d/test.conf; {_RESTART_SSHD}; {_LOG_OUT}",
    ),
    Fault(
        "ssh-configuration",
        r"spark-\w.*: ",
        edit=lambda config: config["ssh"].update(config_file=_other_ssh_config(config, "NoSuchKeyword yes")),
    ),
    Fault(
        "sudo-refused",
        r"spark-b",
        edit=setting("host", "sysctls", value={"net.ipv4.tcp_keepalive_time": "120"}),
    ),
    Fault(
        "login-shell",
        r"spark-b, login shell: expected a login shell of spark that prints nothing by itself, found: Welcome to b",
        "cp -a /home/spark/.bashrc /root/bashrc; sed '1i echo Welcome to b' /root/bashrc > /home/spark/.bashrc",
        "cp -a /root/bashrc /home/spark/.bashrc; rm /root/bashrc",
    ),
    Fault(
        "observation-failed",
        r"spark-b: expected a journal entry of the stack other in sysctl-0\.json, found no whole JSON",
        "mkdir -p /home/spark/.spark-vllm/stacks/other/journal; chown -R spark: /home/spark/.spark-vllm\n"
        "echo '{' > /home/spark/.spark-vllm/stacks/other/journal/sysctl-0.json",
        "rm -r /home/spark/.spark-vllm/stacks/other",
    ),
    Fault(
        "fact-unreadable",
        r"spark-b: could not read the DGX release from /etc/dgx-release, found: .*",
        pretend=("/etc/dgx-release", None, "Kein Anschluss unter dieser Nummer\n", 0),
        severity="warning",
    ),
]

DOCKER = [
    Fault(
        "docker-missing",
        r"spark-b, docker: .*no docker command on the PATH",
        "mkdir /opt/elsewhere; mv /usr/bin/docker /opt/elsewhere/",
        "mv /opt/elsewhere/docker /usr/bin/; rmdir /opt/elsewhere",
    ),
    Fault(
        "docker-permission",
        r"spark-b, docker: .*may not use the Docker socket",
        f"gpasswd -d spark docker; {_LOG_OUT}",
        "gpasswd -a spark docker",  # and no logout: the next look logs in anew
    ),
    Fault(
        "docker-down",
        r"spark-b, docker: .*daemon does not answer",
        "systemctl stop docker.socket docker",
        "systemctl reset-failed docker docker.socket; systemctl start docker.socket docker",
    ),
    Fault(
        "docker-runtime-missing",
        r"spark-b, docker: expected the nvidia runtime or a CDI device, found the runtimes ",
        _daemon_json('del value["runtimes"]'),
        _DAEMON_JSON_BACK,
    ),
    Fault(
        "docker-cgroup-driver",
        r"spark-b, docker: expected the cgroup driver cgroupfs, found systemd",
        _daemon_json('value["exec-opts"] = ["native.cgroupdriver=systemd"]'),
        _DAEMON_JSON_BACK,
        severity="warning",
    ),
    Fault(
        "foreign-container",
        r"spark-b: expected no foreign container spark-vllm-dev-main-rank1, found one of nobody of ours \(vllm-node",
        launcher("spark-vllm-dev-main-rank1"),
        "docker rm -f spark-vllm-dev-main-rank1 > /dev/null",
    ),
    Fault(
        "launcher-running",
        r"spark-b: expected no other launcher, found containers of eugr/spark-vllm-docker running: vllm_node \(",
        launcher(),
        "docker rm -f vllm_node > /dev/null",
    ),
]

MACHINE = [
    Fault(
        "architecture",
        r"spark-b \(hardware\): expected a DGX Spark \(arm64\), found amd64",
        pretend=("uname", "-a", _KERNEL.format(host="b", release="6.17.0-1014-nvidia", machine="x86_64"), 0),
        also=("nodes-differ-architecture",),
    ),
    Fault(
        "gpu-missing",
        r"spark-b: expected a GPU from nvidia-smi, found none \(no nvidia-smi on the PATH",
        "mv /usr/bin/nvidia-smi /root/",
        "mv /root/nvidia-smi /usr/bin/",
    ),
    Fault(
        "driver-not-loaded",
        r"spark-b: expected the NVIDIA driver in the running kernel 6\.17\.0-\S+, found none \(NVIDIA-SMI has failed",
        pretend=("nvidia-smi", None, _NO_DRIVER, 9),
    ),
    Fault(
        "driver-known-bad",
        r"spark-b: expected a driver that is known to work, found 590\.44\.01",
        pretend=(
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total --format=csv,noheader,nounits",
            "NVIDIA GB10, 590.44.01, [N/A]\n",
            0,
        ),
        severity="warning",
        also=("nodes-differ-driver",),
    ),
    Fault(
        "driver-next-boot",
        r"spark-b: expected an nvidia module for 6\.17\.0-2000-nvidia, which the next boot starts, found none",
        "mkdir -p /lib/modules/6.17.0-2000-nvidia/kernel",
        "rm -r /lib/modules/6.17.0-2000-nvidia",
        severity="warning",
    ),
    Fault(
        "gpu-memory-held",
        r"spark-b: expected nobody else in the unified memory, found python3 \(pid 4242, 40\.0 GiB\)",
        pretend=(
            "nvidia-smi",
            "--query-compute-apps=pid,process_name,used_memory --format=csv,noheader,nounits",
            "4242, python3, 40960\n",
            0,
        ),
        severity="warning",
    ),
    Fault(
        "disk-space",
        r"spark-b \(node_root\): expected 2 GB of free space on /srv/small .*, found 0\.0 GB",
        "mkdir /srv/small; mount -t tmpfs -o size=16m tmpfs /srv/small",
        "umount /srv/small; rmdir /srv/small",
        edit=setting("node_root", value="/srv/small/spark-vllm"),
    ),
    Fault(
        "memory-available",
        r"spark-b \(serving\.gpu_memory_utilization\): expected [\d.]+ GiB of available memory .*, found 1\.0 GiB",
        _MEMORY.format(change="s/^MemAvailable:.*/MemAvailable: 1048576 kB/"),
        _MEMORY_BACK,
        severity="warning",
    ),
    Fault(
        "memory-cma",
        r"spark-b: expected CmaFree below CmaTotal \(32 MiB\), found 64 MiB",
        _MEMORY.format(change="/^Cma/d; $a CmaTotal: 32768 kB\\nCmaFree: 65536 kB"),
        _MEMORY_BACK,
        severity="warning",
    ),
    Fault(
        "clock-skew",
        r"nodes: expected clocks within 2 s of each other, found spark-\w at least [\d.]+ s ahead",
        pretend=("date", "+%s.%N", "1700000000.000000000\n", 0),
        severity="warning",
    ),
    Fault(
        "remove-ipc",
        r"spark-b \(serving\.mounts\): .*RemoveIPC=yes",
        edit=setting("groups", "main", "serving", "mounts", value=[{"source": "/dev/shm/mine", "target": "/mine"}]),
        severity="warning",
    ),
    Fault(
        "hostname-loopback",
        r"spark-b: expected the node's own name to resolve to an address that other nodes reach, found 127\.0\.1\.1",
        "cp /etc/hosts /root/hosts; sed -i 's/.* spark-b$/127.0.1.1 spark-b/' /etc/hosts",
        "cp /root/hosts /etc/hosts; rm /root/hosts",
        edit=setting("severities", "hostname-loopback", value="warn"),
        severity="warning",
    ),
    Fault(
        "port-taken",
        r"spark-a \(serving\.port\): expected port 30000 to be free, found it held by holder\.service",
        _LISTEN.format(program=_HOLDING, port=30000),
        "systemctl stop holder",
        host="spark-a",
    ),
    Fault(
        "sysctl-missing",
        r"spark-b \(host\.sysctls\): expected the kernel parameter net\.core\.no_such, found none of that name",
        edit=as_root(setting("host", "sysctls", value={"net.core.no_such": "1"})),
    ),
    Fault(
        "program-missing",
        r"spark-b: expected the program flock \(for the journal\), found none",
        "mv /usr/bin/flock /root/",
        "mv /root/flock /usr/bin/",
    ),
    Fault(
        "tuning-refused",
        r"spark-b \(host\.docker_cgroup_driver\): expected an object of JSON in /etc/docker/daemon\.json, found some",
        "cp -a /etc/docker/daemon.json /root/; echo '{' > /etc/docker/daemon.json",
        "mv /root/daemon.json /etc/docker/daemon.json",
        edit=as_root(setting("host", "docker_cgroup_driver", value="cgroupfs")),
    ),
    Fault(
        "clock-cap-elsewhere",
        r"spark-b \(host\.gpu_clock_cap_mhz\): expected GPU clocks to be set by nobody else, found owners-cap\.service",
        "printf '[Service]\\nExecStart=/usr/bin/nvidia-smi -lgc 200,2150\\n' > /etc/systemd/system/owners-cap.service",
        "rm /etc/systemd/system/owners-cap.service",
        edit=as_root(setting("host", "gpu_clock_cap_mhz", value=2150)),
        severity="warning",
    ),
]

DIFFERENCES = [
    Fault(
        "nodes-differ-kernel",
        r"nodes: expected the same kernel on all nodes, found spark-a \S+, spark-b 6\.17\.0-9999-nvidia",
        pretend=("uname", "-a", _KERNEL.format(host="b", release="6.17.0-9999-nvidia", machine="aarch64"), 0),
        severity="warning",
    ),
    Fault(
        "nodes-differ-driver",
        r"nodes: expected the same GPU and driver on all nodes, found .*spark-b NVIDIA GB10, 580\.95\.05",
        pretend=(
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total --format=csv,noheader,nounits",
            "NVIDIA GB10, 580.95.05, [N/A]\n",
            0,
        ),
    ),
    Fault(
        "nodes-differ-docker",
        r"nodes: expected the same Docker on all nodes, found spark-a \S+, spark-b 99\.2\.1",
        pretend=("docker", "info --format '{{json .}}'", _DOCKER_INFO, 0),
        severity="warning",
    ),
    Fault(
        "nodes-differ-image-store",
        r"nodes: expected the same kind of image store on all nodes, found spark-a \w+, spark-b containerd",
        pretend=(
            "docker",
            "info --format '{{json .}}'",
            _DOCKER_INFO.replace(
                '"Driver"', '"DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]], "Driver"'
            ),
            0,
        ),
        also=("nodes-differ-docker",),
    ),
    Fault(
        "nodes-differ-release",
        r"nodes: expected the same DGX release on all nodes, found spark-a 7\.5\.0, spark-b 7\.6\.0",
        pretend=(
            "/etc/dgx-release",
            None,
            'DGX_NAME="DGX Spark"\nDGX_SWBUILD_VERSION="7.2.3"\nDGX_OTA_VERSION="7.6.0"\n',
            0,
        ),
        severity="warning",
    ),
    Fault(
        "nodes-differ-architecture",
        r"nodes: expected the same architecture on all nodes, found spark-a arm64, spark-b amd64",
        pretend=("uname", "-a", _KERNEL.format(host="b", release="6.17.0-1014-nvidia", machine="x86_64"), 0),
        edit=setting("hardware", value="cpu"),
    ),
]

FABRIC_FAULTS = [
    Fault(
        "netdev-missing",
        r"spark-b \(nodes\[\]\.fabric\[2\]\): expected the interface enp9s0, found only ",
        edit=lambda config: _third_interface(config, "enp9s0"),
    ),
    Fault(
        "netdev-down",
        rf"spark-b \(nodes\[\]\.fabric\[1\]\): expected {TWIN} to be up, found it down",
        f"ip link set {TWIN} down",
        f"ip link set {TWIN} up; netplan apply 2>/dev/null; sleep 1",
    ),
    Fault(
        "carrier-missing",
        rf"spark-a \(nodes\[\]\.fabric\[1\]\): expected a carrier on {TWIN}, found none",
        lab=(("cable-pull", "spark-b", "--twin"), ("cable-plug", "spark-b", "--twin")),
    ),
    Fault(
        "twin-gone",
        rf"spark-b \(nodes\[\]\.fabric\[1\]\): expected the interface {TWIN}, found it gone while .* of its adapter",
        f"ip link delete {TWIN}",
        lab=(("status",), ("reboot", "spark-b")),
    ),
    Fault(
        "twin-unaddressed",
        rf"spark-b \(nodes\[\]\.fabric\[0\]\): expected both halves of a port, found {FABRIC} alone",
        edit=lambda config: [node["fabric"].pop() for node in config["nodes"]],
        severity="warning",
    ),
    Fault(
        "hca-missing",
        rf"spark-b \(nodes\[\]\.fabric\[0\]\): expected the RDMA device mlx5_7 at {FABRIC}, found roce",
        edit=setting("nodes", 1, "fabric", 0, "hca", value="mlx5_7"),
    ),
    Fault(
        "hca-inactive",
        rf"spark-b \(nodes\[\]\.fabric\[0\]\): expected an active port of rocep1s0f1, found it down while {FABRIC} has",
        f"echo '1: DOWN' > {_HCA}/state",
        f"echo '4: ACTIVE' > {_HCA}/state",
    ),
    Fault(
        "gid-missing",
        r"spark-b \(nodes\[\]\.fabric\[0\]\): expected a RoCE v2 GID of 192\.168\.200\.13 on rocep1s0f1, found none",
        f"cp {_HCA}/gids/3 /root/gid; echo 0000:0000:0000:0000:0000:0000:0000:0000 > {_HCA}/gids/3",
        f"cat /root/gid > {_HCA}/gids/3; rm /root/gid",
    ),
    Fault(
        "rdma-absent",
        rf"spark-b \(fabric\.rdma\): expected an RDMA device for {FABRIC}, {TWIN}, found none",
        _CLASSES.format(change="mv infiniband /root/; for d in spark-lab-pci/*; do mv $d/infiniband $d/gone; done"),
        _CLASSES.format(change="mv /root/infiniband .; for d in spark-lab-pci/*; do mv $d/gone $d/infiniband; done"),
    ),
    Fault(
        "speed-low",
        rf"spark-b \(nodes\[\]\.fabric\[0\]\): expected 200 Gb/s on {FABRIC}, found 100 Gb/s",
        f"echo '100 Gb/sec (4X EDR)' > {_HCA}/rate",
        f"echo '200 Gb/sec (4X HDR)' > {_HCA}/rate",
        severity="warning",
    ),
    Fault(
        "address-missing",
        rf"spark-b \(nodes\[\]\.fabric\[1\]\): expected 192\.168\.201\.13/24 on {TWIN}, found no address",
        f"ip address delete 192.168.201.13/24 dev {TWIN}",
        f"ip address add 192.168.201.13/24 dev {TWIN}",
    ),
    Fault(
        "address-volatile",
        r"spark-b \(nodes\[\]\.fabric\[0\]\): expected 192\.168\.200\.13/24 in the boot configuration",
        "mv /etc/netplan/*.yaml /root/; mv /run/systemd/network /root/network",
        "mv /root/*.yaml /etc/netplan/; mv /root/network /run/systemd/network",
        severity="warning",
    ),
    Fault(
        "address-taken",
        r"spark-a \(nodes\[\]\.fabric\[0\]\.address\): expected 192\.168\.200\.12 to be its own, found it at ",
        f"ip address add 192.168.200.12/32 dev {FABRIC}",
        f"ip address delete 192.168.200.12/32 dev {FABRIC}",
    ),
    Fault(
        "subnet-alone",
        r"spark-b \(nodes\[\]\.fabric\[1\]\.address\): expected another node on 192\.168\.202\.0/24, found them on ",
        f"ip address add 192.168.202.13/24 dev {TWIN}",
        f"ip address delete 192.168.202.13/24 dev {TWIN}",
        edit=setting("nodes", 1, "fabric", 1, "address", value="192.168.202.13/24"),
        also=("gid-missing",),  # the lab's own GID tables do not follow the addresses
    ),
    Fault(
        "subnet-shared",
        r"spark-b \(nodes\[\]\.fabric\[0\]\): expected 192\.168\.200\.0/24 on enp1s0f1np1 alone, found ",
        "ip address add 192.168.200.77/24 dev enp1s0f0np0 noprefixroute",
        "ip address delete 192.168.200.77/24 dev enp1s0f0np0",
    ),
    Fault(
        "mtu-differs",
        rf"spark-b \(nodes\[\]\.fabric\[0\]\): expected MTU 9000 on {FABRIC}, found 1500, while spark-a's ",
        f"ip link set {FABRIC} mtu 1500",
        f"ip link set {FABRIC} mtu 9000",
    ),
    Fault(
        "peer-unreachable",
        rf"spark-a, spark-b \(nodes\[\]\.fabric\): expected packets between .* \({TWIN} to \S+\) .* found nobody",
        "nft add table arp drops; nft add chain arp drops out '{ type filter hook output priority 0; }'\n"
        "nft add chain arp drops in '{ type filter hook input priority 0; }'\n"
        f"nft add rule arp drops in iifname {TWIN} drop\n"
        f"nft add rule arp drops out oifname {TWIN} drop; ip neigh flush dev {TWIN}",
        "nft delete table arp drops",
        elsewhere=f"ip neigh flush dev {TWIN}",
    ),
    Fault(
        "peer-unproven",
        r"spark-a, spark-b \(nodes\[\]\.fabric\): expected proof that packets .* arrive, found no word of the peer",
        "nft add table inet drops; nft add chain inet drops in '{ type filter hook input priority 0; }'\n"
        f"nft add rule inet drops in iifname {FABRIC} meta l4proto udp drop",
        "nft delete table inet drops",
        severity="warning",
    ),
    Fault(
        "netplan-foreign",
        rf"spark-b \(fabric\.take_over\): expected no other file that configures {FABRIC}, found {NETPLAN}",
        f"chmod 644 {NETPLAN}",
        f"chmod 600 {NETPLAN}",
        edit=as_root(setting("fabric", "manage", value=True)),
    ),
    Fault(
        "netdev-is-management",
        r"spark-b \(nodes\[\]\.fabric\[2\]\): expected a fabric interface, found that eth0 is the one we are",
        edit=as_root(setting("fabric", "manage", value=True), lambda config: _third_interface(config, "eth0")),
    ),
    Fault(
        "fabric-undiscovered",
        r"spark-b \(nodes\[\]\.fabric\)",
        f"ip address flush dev {FABRIC}; ip address flush dev {TWIN}",
        "netplan apply 2>/dev/null; sleep 1",
        edit=lambda config: [node.pop("fabric") for node in config["nodes"]],
    ),
]

ALL = [*REACHING, *DOCKER, *MACHINE, *DIFFERENCES, *FABRIC_FAULTS]
