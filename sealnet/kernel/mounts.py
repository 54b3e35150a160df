"""Puts a payload's file system together, out of views in which no host socket answers, in a mount namespace that only one thread is in.

connect(2) to a pathname socket looks the listener up by inode. An overlay has inodes of its own, so every socket and FIFO of the host,
wherever it lies and whenever it was made, is only a dead name in a view (measured on 6.18: ECONNREFUSED; a read-only bind lets it through).

Other payloads may write some of the directories that lead to a source or destination, and swap them for links meanwhile. So every path is
opened once, without following links or checked to be still what its name said, and mounted by descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from sealnet.errors import CannotSeal
from sealnet.kernel import libc
from sealnet.kernel.netns import NAMES
from sealnet.model.plan import User
from sealnet.model.view import Kind, Step

# Mount points that the payload gets fresh ones of, or nothing.
PRIVATE = ("/dev", "/proc", "/run", "/sys", "/tmp", "/var/run", "/var/tmp")
# Other engines' storage: hundreds of mounts that no payload needs.
_STORES = tuple(f"/var/lib/{name}" for name in ("containerd", "containers", "docker", "kubelet", "lxc", "lxd", "machines"))
# Views of the kernel, not of files.
_KERNEL = frozenset(
    "autofs binfmt_misc bpf cgroup cgroup2 configfs debugfs devpts devtmpfs efivarfs fusectl hugetlbfs mqueue nsfs proc pstore rpc_pipefs "
    "securityfs selinuxfs sysfs tracefs".split()
)
_QUIET = libc.MS_NOSUID | libc.MS_NODEV
# How much of a directory that is bound as it is gets searched for sockets.
_SEARCH_ENTRIES, _SEARCH_S, _COVERED = 20_000, 0.05, 256
# What bwrap's --dev has: name and number (Documentation/admin-guide/devices.txt).
DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_ACCESS_LIST = "system.posix_acl_access"


class Mount(NamedTuple):
    """One line of /proc/self/mountinfo."""

    device: str
    target: str
    fstype: str
    options: str = ""


def parse_mountinfo(text: str) -> list[Mount]:
    found = []
    for line in filter(None, text.split("\n")):
        before, _, after = line.partition(" - ")
        words = before.split(" ")
        found.append(Mount(words[2], _unescape(words[4]), after.split(" ")[0], words[5]))
    return found


def _unescape(text: str) -> str:
    for escape, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(escape, char)
    return text


def beneath(path: str, above: str) -> bool:
    """Whether `path` is `above` or lies below it."""
    return path == above or path.startswith(above.rstrip("/") + "/")


def of(mounts: Sequence[Mount], path: str) -> Mount:
    """The mount that `path` lies on."""
    return max((mount for mount in reversed(mounts) if beneath(path, mount.target)), key=lambda mount: len(mount.target))


def is_kernels(mount: Mount) -> bool:
    """The kernel's own file systems, and other engines' stores."""
    return mount.fstype in _KERNEL or any(beneath(mount.target, store) for store in _STORES)


def below(mounts: Sequence[Mount], source: str, stage: str, *, root: bool = True) -> list[Mount]:
    """What is mounted below `source`, top first, the last of several at one place.

    In the `root` view not where the payload gets a private one anyway.
    """
    inside = {
        mount.target: mount
        for mount in mounts
        if beneath(mount.target, source)
        and mount.target != source
        and not beneath(mount.target, stage)
        and not (root and source == "/" and any(beneath(mount.target, private) for private in PRIVATE))
    }
    return [inside[target] for target in sorted(inside)]


def is_shown(mount: Mount) -> bool:
    """In a view: nothing of the kernel's, and nothing whose server is a program that may not answer (FUSE)."""
    return not is_kernels(mount) and mount.fstype != "fuse" and not mount.fstype.startswith("fuse.")


class Stage:
    """A tmpfs on `path`, seen by the calling thread alone; `root` becomes the payload's file system."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.root = f"{path}/root"
        self._count = 0
        libc.unshare(libc.CLONE_NEWNS)
        try:
            libc.mount("none", "/", None, libc.MS_REC | libc.MS_PRIVATE)
        except OSError as e:
            raise CannotSeal(
                f"cannot make the mounts of a run private: {_cause(e)}",
                hint="/ must be a mount point; in a chroot: mount --bind DIR DIR before chroot DIR",
            ) from e
        self._let_go_of_names()
        self._mounts = parse_mountinfo(os.fsdecode(Path("/proc/thread-self/mountinfo").read_bytes()))
        libc.mount("sealnet", path, "tmpfs", _QUIET, "mode=0755")
        _mkdir(self.root)
        self._empty_directory, self._empty_file = self._new("empty"), f"{path}/nothing"
        os.close(os.open(self._empty_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
        # What a destination may be made on: our own tmpfs, never a directory of somebody else's.
        self._own = set[int]()
        self._rights: User | None = None

    @staticmethod
    def _let_go_of_names() -> None:
        """The names of all runs' namespaces, where their directory is a mount (as `ip netns` makes it).

        Copies of them would keep namespaces that have ended; and bwrap reads the table of mounts at each of twenty steps, which with a
        thousand names takes it 60 ms.
        """
        with contextlib.suppress(OSError):
            while True:
                libc.umount(str(NAMES), libc.MNT_DETACH | libc.UMOUNT_NOFOLLOW)

    def build(
        self,
        steps: Sequence[Step],
        files: Mapping[str, str],
        others: Sequence[tuple[str, str]] = (),
        rights: User | None = None,
        hidden: Sequence[str] = (),
    ) -> None:
        """Carry out the steps; `files` (path: text) stand in the root view in place of the host's.

        `others` are (destination, source) of what bwrap will mount itself. What was asked for is opened with the `rights` of who asked.
        """
        self._rights, self._hidden = rights, tuple(hidden)
        asked = [*((step.dest, step.source) for step in steps if step.dest != "/"), *others]
        with _as(rights):
            places = {"/dev": True, "/proc": True, **_kinds(asked)}
        for step in steps:
            try:
                self._carry_out(step, files, places)
            except OSError as e:
                raise CannotSeal(f"cannot mount {step}: {_cause(e)}", hint=_HINTS.get(e.errno or 0)) from e

    def _carry_out(self, step: Step, files: Mapping[str, str], places: Mapping[str, bool]) -> None:
        if step.dest == "/":
            self._view(step.source, "/", files, places)
            return
        if step.kind is Kind.TMPFS:
            with self._place(step.dest, directory=True) as place:
                libc.mount("sealnet", place, "tmpfs", _QUIET, f"mode={step.mode:04o}")
            with self._place(step.dest, directory=True) as place:
                self._own.add(os.stat(place).st_dev)
            return
        if step.kind is Kind.SYSFS:
            with self._place(step.dest, directory=True) as place:
                libc.mount("sealnet", place, "sysfs", libc.MS_RDONLY | libc.MS_NOEXEC | _QUIET)
            return
        with _opened(step.source, self._rights) as source:
            mode = os.stat(source).st_mode
            if step.kind is Kind.VIEW and stat.S_ISDIR(mode):
                self._view(step.source, step.dest, {}, {}, self._rights)
                return
            if step.kind is Kind.VIEW and not stat.S_ISREG(mode):
                raise CannotSeal(
                    f"cannot bind {step.source} read-only: it is neither a directory nor a regular file",
                    hint=f"--bind {step.source} opens it as it is",
                )
            if step.kind is Kind.BIND and is_kernels(of(self._mounts, step.source)):
                raise CannotSeal(f"cannot bind {step.source} writable: it is the kernel's own ({of(self._mounts, step.source).fstype})")
            with self._place(step.dest, directory=stat.S_ISDIR(mode)) as place:
                libc.mount(source, place, None, libc.MS_BIND | libc.MS_REC)
        for path in self._hidden:
            # At once: nothing that looks through what was bound is to look in there.
            if posixpath.dirname(path) == step.dest and step.kind is Kind.BIND:
                with self._place(path, directory=True) as place:
                    libc.mount("sealnet", place, "tmpfs", _QUIET, "mode=0700")
        if step.kind is Kind.VIEW:
            # A regular file holds no socket.
            self._make_read_only(step.dest, of(self._mounts, step.source))
            return
        for mount in below(self._mounts, step.source, self.path, root=False):
            # A chroot's /proc, for example: by it, other processes of the user's are within reach.
            if is_kernels(mount):
                self._cover(posixpath.join(step.dest, posixpath.relpath(mount.target, step.source)))
        if not step.sockets and stat.S_ISDIR(mode):
            self._mask_sockets(step.dest)

    def devices(self, console: str | None) -> str:
        """A /dev of new nodes: bwrap would bind the host's, and root's payload could change their modes. Where it is."""
        made = self._new("dev")
        libc.mount("sealnet", made, "tmpfs", libc.MS_NOSUID | libc.MS_NOEXEC, "mode=0755,size=1m")
        for name, (major, minor) in DEVICES.items():
            os.mknod(f"{made}/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
            os.chmod(f"{made}/{name}", 0o666)  # noqa: S103 - as the kernel makes them
        for name, target in {
            "fd": "/proc/self/fd",
            "stdin": "/proc/self/fd/0",
            "stdout": "/proc/self/fd/1",
            "stderr": "/proc/self/fd/2",
        }.items():
            os.symlink(target, f"{made}/{name}")
        _mkdir(f"{made}/pts")
        libc.mount("sealnet", f"{made}/pts", "devpts", libc.MS_NOSUID | libc.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
        os.symlink("pts/ptmx", f"{made}/ptmx")
        _mkdir(f"{made}/shm")
        libc.mount("sealnet", f"{made}/shm", "tmpfs", _QUIET, "mode=1777")
        if console is not None:
            os.close(os.open(f"{made}/console", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            libc.mount(console, f"{made}/console", None, libc.MS_BIND)
        return made

    def _make_read_only(self, dest: str, like: Mount | None = None) -> None:
        # The mount covers what was opened to make it, so the place is opened anew.
        with self._place(dest, directory=False) as place:
            libc.mount("none", place, None, libc.MS_REMOUNT | libc.MS_BIND | libc.MS_RDONLY | _QUIET | _noexec(like))

    def closed_to(self, user: User, paths: Sequence[str]) -> list[str]:
        """Those of the directories that the user may not enter in the payload's file system. What is not there is not closed."""
        found = []
        root = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        before = os.getgroups()
        try:
            libc.set_file_identity(user.uid, user.gid, user.groups)
            for path in paths:
                try:
                    # The dot asks for the right to search the directory itself.
                    os.close(libc.open_in_root(root, f"{path}/.", os.O_PATH))
                except PermissionError:
                    found.append(path)
                except OSError:
                    continue
        except OSError:
            # An architecture that we do not know by number: then whoever enters says so.
            return []
        finally:
            with contextlib.suppress(OSError):
                libc.set_file_identity(0, 0, before)
            os.close(root)
        return found

    def has(self, path: str) -> bool:
        """Whether there is such a directory in the payload's file system."""
        root = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.close(libc.open_in_root(root, path, os.O_PATH | os.O_DIRECTORY))
        except OSError:
            return False
        finally:
            os.close(root)
        return True

    def read_only(self, source: str) -> str:
        """A read-only mount of one directory of the host, outside the payload's file system; where it is."""
        made = self._new("ro")
        libc.mount(source, made, None, libc.MS_BIND)
        libc.mount("none", made, None, libc.MS_REMOUNT | libc.MS_BIND | libc.MS_RDONLY | _QUIET)
        return made

    def _new(self, kind: str) -> str:
        self._count += 1
        made = f"{self.path}/{kind}{self._count}"
        _mkdir(made)
        return made

    @contextlib.contextmanager
    def _place(self, dest: str, *, directory: bool) -> Iterator[str]:
        """`dest` in the payload's file system, opened without following a link; made where it is missing on a tmpfs of our own."""
        parent = os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        parts = [part for part in dest.split("/") if part]
        try:
            for at, part in enumerate(parts):
                last = at == len(parts) - 1
                try:
                    found = libc.open_beneath(parent, part, os.O_PATH | (0 if last and not directory else os.O_DIRECTORY))
                except FileNotFoundError:
                    if os.fstat(parent).st_dev not in self._own:
                        raise
                    _make_in(parent, part, directory=directory or not last)
                    found = libc.open_beneath(parent, part, os.O_PATH)
                os.close(parent)
                parent = found
            yield f"/proc/self/fd/{parent}"
        finally:
            os.close(parent)

    def _view(self, source: str, dest: str, files: Mapping[str, str], places: Mapping[str, bool], rights: User | None = None) -> None:
        """A read-only overlay of the tree at `source`, on `dest` of the payload's file system; one for each mount in it.

        What cannot be shown, or is not to be, is covered: beneath it there may be what the host had hidden by it.
        """
        mounts = below(self._mounts, source, self.path, root=dest == "/")
        targets = [source, *(mount.target for mount in mounts if is_shown(mount))]
        # /etc may be a mount of its own; one that is a single file is covered by what stands in its place.
        trees = [target for target in targets if target not in files]
        self._overlay(source, dest, of(self._mounts, source), _of(source, trees, files), _of(source, targets, places), rights)
        covered: list[str] = []
        for mount in mounts:
            if any(beneath(mount.target, above) for above in covered):
                continue
            inner = posixpath.join(dest, posixpath.relpath(mount.target, source))
            try:
                if not is_shown(mount):
                    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
                own = _of(mount.target, trees, files)
                self._overlay(mount.target, inner, mount, own, _of(mount.target, targets, places), rights, keep=mount.target in files)
            except (OSError, CannotSeal):
                covered.append(mount.target)
                self._cover(inner)

    def _overlay(
        self,
        target: str,
        dest: str,
        like: Mount,
        files: Mapping[str, str],
        places: Mapping[str, bool],
        rights: User | None,
        *,
        keep: bool = False,
    ) -> None:
        with _opened(target, rights) as source:
            found = os.stat(source)
            if not stat.S_ISDIR(found.st_mode):
                # A single file that is a mount (a container's /etc/hosts), unless we have put one there ourselves.
                if not stat.S_ISREG(found.st_mode):
                    raise OSError(errno.EPERM, os.strerror(errno.EPERM))
                if not keep:
                    with self._place(dest, directory=False) as place:
                        libc.mount(source, place, None, libc.MS_BIND)
                    self._make_read_only(dest, like)
                return
            top, lower = self._new("top"), self._new("low")
            for name, text in files.items():
                _make(top, target, name, text)
            for name, directory in places.items():
                _make(top, target, name, None if directory else "")
            # The overlay shows owner, mode and access list of its topmost directory, so they must be the host's.
            _like(top, source)
            libc.mount(source, lower, None, libc.MS_BIND)
            with self._place(dest, directory=True) as place:
                libc.mount("sealnet", place, "overlay", libc.MS_RDONLY | _QUIET | _noexec(like), f"lowerdir={top}:{lower}")

    def _cover(self, dest: str) -> None:
        try:
            with self._place(dest, directory=False) as place:
                directory = stat.S_ISDIR(os.stat(place).st_mode)
                libc.mount(self._empty_directory if directory else self._empty_file, place, None, libc.MS_BIND)
            self._make_read_only(dest)
        except OSError as e:
            # Where the way there is none in the view, it shows nothing either.
            if e.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                raise

    def _mask_sockets(self, dest: str) -> None:
        """Cover the sockets in a directory that is bound as it is. Best effort: it is shared, and a later one cannot be seen from here."""
        deadline, seen, covered = time.monotonic() + _SEARCH_S, 0, 0
        with self._place(dest, directory=True) as place:
            waiting = [os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        try:
            while waiting:
                directory = waiting.pop()
                try:
                    with contextlib.suppress(OSError), os.scandir(directory) as entries:
                        for entry in entries:
                            seen += 1
                            if seen > _SEARCH_ENTRIES or covered >= _COVERED or time.monotonic() > deadline:
                                return
                            if entry.is_dir(follow_symlinks=False):
                                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                                with contextlib.suppress(OSError):
                                    waiting.append(os.open(entry.name, flags, dir_fd=directory))
                            elif not entry.is_file(follow_symlinks=False) and not entry.is_symlink():
                                covered += _cover_socket(directory, entry.name, self._empty_file)
                finally:
                    os.close(directory)
        finally:
            for directory in waiting:
                os.close(directory)


T = TypeVar("T")

_HINTS = {
    errno.ENODEV: "modprobe overlay; without it a host socket would answer in the sandbox",
    errno.ELOOP: "name the real path: a symbolic link is on the way",
    errno.ENOENT: "make the directory first: sealnet makes none in a directory of somebody else's",
}


def _cause(error: OSError) -> str:
    return os.strerror(error.errno or 0)


def _kinds(asked: Sequence[tuple[str, str]]) -> dict[str, bool]:
    """Whether each (destination, source) is a place for a directory: a file is mounted on a file, anything else on a directory."""
    return {dest: not source or not os.path.exists(source) or os.path.isdir(source) for dest, source in asked}


@contextlib.contextmanager
def _as(user: User | None) -> Iterator[None]:
    """The calling thread, and no other, looks at files as `user`: else it would tell of what that one may not see."""
    if user is None:
        yield
        return
    before = os.getgroups()
    try:
        libc.set_file_identity(user.uid, user.gid, user.groups)
        yield
    finally:
        libc.set_file_identity(0, 0, before)


@contextlib.contextmanager
def _opened(path: str, rights: User | None) -> Iterator[str]:
    """`path` by descriptor, when it is still what its name says: no component is a link. Opened with somebody's `rights`, or with ours."""
    with _as(rights):
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != path:
            raise CannotSeal(
                f"cannot use {path}: it now leads to {os.readlink(f'/proc/self/fd/{fd}')}",
                hint="somebody has moved it or put a link in its way; name the real path",
            )
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _noexec(like: Mount | None) -> int:
    return libc.MS_NOEXEC if like is not None and "noexec" in like.options.split(",") else 0


def _of(target: str, targets: Sequence[str], places: Mapping[str, T]) -> dict[str, T]:
    return {name: kind for name, kind in places.items() if _nearest(targets, name) == target}


def _mkdir(path: str) -> None:
    """A directory of mode 0755, whatever the umask is."""
    os.mkdir(path, 0o755)
    os.chmod(path, 0o755)  # noqa: S103 - what is to be seen through it is


def _like(made: str | Path, host: str | Path) -> None:
    """Give a directory the owner, mode and access list of another."""
    found = os.stat(host)
    os.chown(made, found.st_uid, found.st_gid)
    os.chmod(made, stat.S_IMODE(found.st_mode))
    try:
        access = os.getxattr(host, _ACCESS_LIST)
    except OSError as e:
        # ENODATA: there is none; EOPNOTSUPP: that file system has no such thing.
        if e.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
    else:
        os.setxattr(made, _ACCESS_LIST, access)


def _nearest(targets: Sequence[str], name: str) -> str:
    return max((target for target in targets if beneath(name, target)), key=len, default="")


def _make_in(parent: int, name: str, *, directory: bool) -> None:
    where = f"/proc/self/fd/{parent}/{name}"
    if directory:
        _mkdir(where)
    else:
        os.close(os.open(where, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))


def _make(top: str, target: str, name: str, text: str | None) -> None:
    """Put `name` (absolute, below `target`) into a top layer: a file with `text`, or a place to mount on, of the host's kind.

    In the view a directory of the top layer stands before whatever the host has there, so no link swapped in later leads away from it.
    """
    relative = posixpath.relpath(name, target)
    parts = [] if relative == "." else relative.split("/")
    made, host = Path(top), Path(target)
    for at, part in enumerate(parts):
        made, host = made / part, host / part
        last = at == len(parts) - 1
        if last and text is not None:
            made.write_text(text)
            made.chmod(0o644)
            return
        try:
            found = host.lstat()
        except OSError:
            if not made.is_dir():
                _mkdir(str(made))
            continue
        if not stat.S_ISDIR(found.st_mode):
            # A link or file of the host's is left as it is: a destination that leads over a link is refused when it is opened.
            return
        made.mkdir(exist_ok=True)
        _like(made, host)


def _cover_socket(directory: int, name: str, cover: str) -> bool:
    """Whether there was one."""
    with contextlib.suppress(OSError):
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                libc.mount(cover, f"/proc/self/fd/{fd}", None, libc.MS_BIND)
                return True
        finally:
            os.close(fd)
    return False
