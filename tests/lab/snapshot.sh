# What a host is, apart from what changes by itself: systemd gives each service with a private /tmp a folder of another
# name at each of its starts. Destroy keeps and names caches (weights, hashes, images).
echo '## etc'
find /etc -xdev \( -type f -o -type l \) ! -name '*.lock' | sort | while read -r f; do
    stat -c '%n %a %U:%G' "$f"
    if [ -L "$f" ]; then readlink "$f"; else sha256sum "$f"; fi
done
echo '## units'
systemctl list-unit-files --no-legend --no-pager | grep -v transient | sort
systemctl list-units --type=service --state=running --no-legend --no-pager --plain | cut -d' ' -f1 |
    grep -v -e '^session-' -e '^user@' -e '^user-runtime' | sort
echo '## sysctls'
find /proc/sys/net -type f -readable 2> /dev/null |
    grep -v -e /route/flush -e nf_conntrack_count -e stable_secret | sort | while read -r f; do
    printf '%s = ' "$f"
    tr '\n\t' '  ' < "$f" 2> /dev/null
    echo
done
echo '## links'
ip -j address show | python3 -c '
import json, sys
for link in json.load(sys.stdin):
    addresses = sorted(address["local"] for address in link["addr_info"])
    print(link["ifname"], link["mtu"], addresses, "UP" in link["flags"])
'
echo '## filters'
nft list ruleset
echo '## users'
cat /etc/passwd /etc/group
echo '## containers'
docker ps -a --format '{{.Names}}'
docker volume ls -q
echo '## home'
find /home /root /opt /srv /var/tmp -xdev ! -path '/home/*/.spark-vllm/weights*' ! -path '/home/*/.spark-vllm/cache*' \
    ! -path '/home/*/.spark-vllm' ! -path /home/spark ! -path '/var/tmp/systemd-private-*' -printf '%p %m %u:%g\n' | sort
