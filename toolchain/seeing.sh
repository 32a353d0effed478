#!/bin/sh
# Prints the path of a program that the tests look with: chromium, prometheus, promtool or prometheus-node-exporter.
# Where it is not installed, Debian's package is unpacked into the cache, not installed: installing Prometheus would
# start servers on this machine. What chromium needs and this machine lacks is unpacked beside it.
set -eu

program=${1:?usage: toolchain/seeing.sh chromium|prometheus|promtool|prometheus-node-exporter}
case $program in
    chromium) packages="chromium fonts-dejavu-core" ;;
    prometheus | promtool) packages=prometheus ;;
    prometheus-node-exporter) packages=prometheus-node-exporter ;;
    *) echo "seeing: unknown program $program" >&2; exit 64 ;;
esac
if command -v "$program"; then
    exit 0
fi

cache=${SPARK_VLLM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/spark-vllm}/seeing/${packages%% *}
if [ ! -x "$cache/run/$program" ]; then
    if ! command -v apt-get > /dev/null || ! command -v dpkg > /dev/null; then
        echo "seeing: no $program, and no apt-get to fetch one; install it" >&2
        exit 1
    fi
    echo "seeing: no $program; unpacking Debian's ${packages%% *} into $cache" >&2
    mkdir -p "$(dirname "$cache")"
    work=$(mktemp -d "$(dirname "$cache")/unfinished.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    trap 'exit 130' INT TERM
    mkdir -p "$work/archives/partial" "$work/root" "$work/run"
    fetch() {
        # shellcheck disable=SC2086
        timeout 600 apt-get -q -y install --download-only --no-install-recommends -o Debug::NoLocking=1 \
            -o Dir::Cache::archives="$work/archives" $packages > "$work/log" 2>&1
    }
    # Before the first update apt knows no packages.
    if ! fetch && ! { timeout 300 apt-get -q update > "$work/log" 2>&1 && fetch; }; then
        echo "seeing: apt-get could not fetch $packages: $(tail -n 1 "$work/log")" >&2
        exit 1
    fi
    for package in "$work"/archives/*.deb; do
        dpkg -x "$package" "$work/root"
    done
    rm -rf "$work/archives"
    for name in prometheus promtool prometheus-node-exporter; do
        if [ -x "$work/root/usr/bin/$name" ]; then
            ln -s "../root/usr/bin/$name" "$work/run/$name"
        fi
    done
    if [ "$program" = chromium ]; then
        # Fonts and libraries lie where neither the loader nor fontconfig would look.
        cat > "$work/run/chromium" << 'END'
#!/bin/sh
root=$(CDPATH='' cd -- "$(dirname -- "$0")/../root" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{
    echo '<fontconfig>'
    echo "<dir>$root/usr/share/fonts</dir><dir>/usr/share/fonts</dir><cachedir>$work/fonts</cachedir>"
    echo '<alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias>'
    echo '<match><edit name="family" mode="append" binding="weak"><string>DejaVu Sans</string></edit></match>'
    echo '</fontconfig>'
} > "$work/fonts.conf"
libraries=$(find "$root/usr/lib" "$root/lib" -name '*.so*' -printf '%h\n' 2> /dev/null | sort -u | tr '\n' ':')
FONTCONFIG_FILE=$work/fonts.conf LD_LIBRARY_PATH=$libraries HOME=$work "$root/usr/lib/chromium/chromium" "$@"
END
        chmod 755 "$work/run/chromium"
    fi
    chmod 755 "$work"
    rm -rf "$cache"
    mv "$work" "$cache"
    trap - EXIT
fi
echo "$cache/run/$program"
