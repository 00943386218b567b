#!/bin/sh
# PID 1 of the guest, a real Linux kernel with an NFS client, in user mode; its root is the host's, through hostfs.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1
stty raw -echo
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /mnt
kernel=/usr/lib/uml/modules/$(uname -r)/kernel
for module in net/sunrpc/sunrpc fs/nfs_common/grace fs/lockd/lockd fs/netfs/netfs fs/fscache/fscache fs/nfs/nfs \
  fs/nfs_common/nfs_acl net/dns_resolver/dns_resolver fs/nfs/nfsv4; do
  [ -f "$kernel/$module.ko" ] && insmod "$kernel/$module.ko"
done
ip link set lo up
if [ -e /sys/class/net/vec0 ]; then
  ip addr add 10.77.0.2/24 dev vec0
  ip link set vec0 up
fi
"$PYTHON" "$GUEST"
echo o >/proc/sysrq-trigger
read -r _  # the power goes in a moment
