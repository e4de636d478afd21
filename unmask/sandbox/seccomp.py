"""The system calls that a sandboxed program may make: for computing, files, processes, threads and time. All
others fail with EPERM.

So programs reach no sockets, namespaces, mounts, tracing, keys, BPF, io_uring, performance counters, shared
memory, message queues, or calls of newer kernels. They lock no files, because the host and other sandboxes
would see the locks. They do not leave their session or process group (`setsid`, `setpgid`), because the
scheduler gives each session a share of its own.
"""

from __future__ import annotations

import errno
from pathlib import Path

FILES = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 open openat creat close close_range
lseek dup dup2 dup3 stat fstat lstat newfstatat statx statfs fstatfs access faccessat faccessat2 readlink
readlinkat getdents getdents64 getcwd chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat
renameat2 link linkat symlink symlinkat truncate ftruncate fallocate fsync fdatasync chmod fchmod fchmodat
utime utimes utimensat umask fadvise64 copy_file_range sendfile pipe pipe2 poll ppoll select pselect6
epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait eventfd eventfd2
"""
MEMORY = "mmap mprotect munmap mremap madvise mincore membarrier brk getrandom"
PROCESSES = """
fork vfork execve exit exit_group wait4 waitid futex futex_waitv set_robust_list get_robust_list
set_tid_address rseq arch_prctl prctl getpid getppid gettid getpgrp getpgid getsid getuid geteuid getgid
getegid getresuid getresgid getgroups getpriority sched_yield sched_getaffinity sched_getparam
sched_getscheduler getrlimit setrlimit prlimit64 getrusage getcpu uname sysinfo times rt_sigaction
rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigpending rt_sigtimedwait sigaltstack kill tkill tgkill pause
restart_syscall
"""
TIME = """
clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time alarm getitimer setitimer timer_create
timer_settime timer_gettime timer_getoverrun timer_delete timerfd_create timerfd_settime timerfd_gettime
"""
ALLOWED = (FILES + " " + MEMORY + " " + PROCESSES + " " + TIME).split()
IOCTLS = {"TCGETS": 0x5401, "FIONREAD": 0x541B, "FIONBIO": 0x5421, "FIONCLEX": 0x5450, "FIOCLEX": 0x5451}
"""Allowed requests of `ioctl`: whether a file is a terminal, and how it is read and inherited."""
FCNTLS = {
    "F_DUPFD": 0,
    "F_GETFD": 1,
    "F_SETFD": 2,
    "F_GETFL": 3,
    "F_SETFL": 4,
    "F_DUPFD_CLOEXEC": 1030,
    "F_GETPIPE_SZ": 1032,
}
"""Allowed commands of `fcntl`. All others lock, lease or watch files, also those that the host and other
sandboxes see."""
NAMESPACES = 0x7E020000
"""The flags of `clone` that create namespaces."""
PARENT, THREAD, VFORK = 0x8000, 0x10000, 0x4000
"""Flags of `clone`. A thread that waits until its child ends or executes (`VFORK`) looks as if it waited for
the disk; `usage_of` tells the two apart by the thread's children, so the new process must be a child of the
thread."""


def write_filter(path: Path) -> None:
    """Write the filter as a BPF program for this architecture. ImportError or OSError without pyseccomp and
    libseccomp."""
    import pyseccomp

    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    for name in ALLOWED:
        if pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) >= 0:  # some belong to other architectures
            rules.add_rule(pyseccomp.ALLOW, name)
    for name, requests in (("ioctl", IOCTLS), ("fcntl", FCNTLS)):
        for request in requests.values():
            rules.add_rule(pyseccomp.ALLOW, name, pyseccomp.Arg(1, pyseccomp.EQ, request))
    for other in (THREAD, VFORK):
        rules.add_rule(
            pyseccomp.ALLOW, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, NAMESPACES | PARENT | other, 0)
        )
    # A filter cannot see its flags, which are in memory. With ENOSYS, libraries fall back to `clone`.
    rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
    with path.open("wb") as file:
        rules.export_bpf(file)
