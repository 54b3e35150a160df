"""The parts of scripts/vm that need no machine: first file system, cache, what comes back, page; and the list of smoke tests."""

from __future__ import annotations

import io
import lzma
import subprocess
import sys
import tarfile
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.machines import cache, debian, initrd, matrix, qemu
from scripts.machines.definitions import EXTRAS, HOSTS, KERNELS, LANE, MATRIX, Cell
from scripts.machines.failure import NoMachine
from scripts.machines.images import Machine
from scripts.machines.matrix import Counts, Row
from tests.smoke import SMOKE

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEALNET_VM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def release(directory: Path, *, builtin: str = "kernel/fs/ext4/ext4.ko\n") -> Path:
    """A kernel's modules, two of which need a third; one is compressed."""
    for name in ("virtio.ko", "virtio_pci.ko"):
        (directory / name).write_bytes(name.encode())
    (directory / "virtio-blk.ko.xz").write_bytes(lzma.compress(b"virtio-blk.ko"))
    (directory / "modules.dep").write_text("virtio-blk.ko.xz: virtio.ko\nvirtio_pci.ko: virtio.ko\nvirtio.ko:\n")
    (directory / "modules.builtin").write_text(builtin)
    return directory


def unpacked(archive: bytes, directory: Path) -> Path:
    directory.mkdir()
    subprocess.run(["busybox", "cpio", "-i"], cwd=directory, input=archive, check=True, capture_output=True)
    return directory


@pytest.mark.root
@pytest.mark.tool("busybox")
def test_an_initrd_is_what_cpio_reads_with_each_module_after_those_it_needs(tmp_path: Path) -> None:
    busybox = tmp_path / "busybox"
    busybox.write_bytes(b"a program")

    found = unpacked(initrd.build(release(tmp_path), busybox), tmp_path / "found")

    assert (found / "busybox").read_bytes() == b"a program"
    assert (found / "init").stat().st_mode & 0o777 == 0o755
    assert (found / "modules/order").read_text().split() == ["virtio.ko", "virtio_pci.ko", "virtio-blk.ko"]
    assert (found / "modules/virtio-blk.ko").read_bytes() == b"virtio-blk.ko"


def test_a_kernel_without_a_module_that_a_disk_needs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "busybox").touch()

    with pytest.raises(NoMachine, match="no module ext4"):
        initrd.build(release(tmp_path, builtin=""), tmp_path / "busybox")


def test_what_is_kept_is_made_once_and_replaces_what_it_was_before(kept: Path) -> None:
    made = []

    def make(into: Path) -> None:
        made.append(into)
        (into / "disk").touch()

    old = cache.obtain("host-a", "1", make)
    assert cache.obtain("host-a", "1", make) == old
    other = cache.obtain("host-a+b", "1", make)
    new = cache.obtain("host-a", "2", make)

    assert len(made) == 3
    assert (other / "disk").exists()
    assert (new / "disk").exists()
    assert not old.exists()


def test_what_could_not_be_made_leaves_nothing_and_is_made_by_the_next(kept: Path) -> None:
    def fail(into: Path) -> None:
        (into / "half").touch()
        raise NoMachine("cannot make it")

    with pytest.raises(NoMachine):
        cache.obtain("host-a", "1", fail)
    left = [path for path in kept.iterdir() if path.is_dir()]
    (kept / ".host-a-killed").mkdir()
    cache.obtain("host-a", "1", lambda into: (into / "disk").touch())

    assert left == []
    assert [path.name for path in kept.iterdir() if path.is_dir()] == ["host-a@1"]


def test_two_who_want_the_same_make_it_once(kept: Path) -> None:
    made, go_on = [], threading.Event()

    def make(into: Path) -> None:
        made.append(into)
        go_on.wait(60)

    threads = [threading.Thread(target=cache.obtain, args=("host-a", "1", make)) for _ in range(4)]
    for thread in threads:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join()

    assert len(made) == 1


def test_a_key_changes_with_the_recipe_and_with_the_code(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text("1")
    keys = {cache.key_of({"packages": ["a"]}, code), cache.key_of({"packages": ["b"]}, code), cache.key_of({"packages": ["a"]})}
    code.write_text("2")
    keys.add(cache.key_of({"packages": ["a"]}, code))

    assert len(keys) == 4
    assert cache.key_of({"a": 1, "b": 2}) == cache.key_of({"b": 2, "a": 1})


def test_the_archives_are_those_of_this_machines_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "http://mirror.test/debian/\nhttp://other.test/tools/\nhttp://mirror.test/debian-security/\nhttp://second.test/debian/\n"
    monkeypatch.setattr(debian, "run", lambda *_args, **_options: told)
    asked = debian.sources_list(HOSTS["bookworm"].sources)
    monkeypatch.setattr(debian, "run", lambda *_args, **_options: "")
    public = debian.archives()

    assert "http://mirror.test/debian bookworm main" in asked
    assert "http://mirror.test/debian-security bookworm-security main" in asked
    assert public == {name: f"http://deb.debian.org/{name}" for name in ("debian", "debian-security")}


def test_a_program_that_fails_is_told_with_the_end_of_what_it_said() -> None:
    with pytest.raises(NoMachine, match="cannot do that: sh ended with status 3") as error:
        debian.run(["sh", "-c", "seq 1000; echo why >&2; exit 3"], doing="do that")

    assert error.value.output.splitlines()[-2:] == ["1000", "why"]
    assert len(error.value.output.splitlines()) < 100


def test_a_job_is_the_checkout_and_the_command_as_they_are(tmp_path: Path) -> None:
    qemu.pack(tmp_path / "job", ("echo", "two words", ""))

    with tarfile.open(tmp_path / "job") as archive:
        names = archive.getnames()
        command = archive.extractfile("job/command")
        assert command is not None
        assert command.read() == b"echo\0two words\0\0"
        assert {entry.uid for entry in archive} == {0}
    assert {"sealnet/pyproject.toml", "sealnet/tests/test_machines.py", "job/start"} <= set(names)
    assert not [name for name in names if "/.venv" in name or "/__pycache__" in name or "/.git/" in name]


def test_what_a_machine_returns_lands_in_its_directory_only(tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "console.log").write_text("ours")
    with tarfile.open(tmp_path / "returned", "w") as archive:
        for name, content in (("./junit.xml", b"<a/>"), ("../../outside", b"bad"), ("./console.log", b"theirs")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("./link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)

    qemu.unpack(tmp_path / "returned", results)

    assert {path.name for path in results.iterdir()} == {"junit.xml", "outside", "console.log"}
    assert (results / "console.log").read_text() == "ours"
    assert not (tmp_path / "outside").exists()


def test_a_disk_that_nothing_was_written_to_returns_nothing(tmp_path: Path) -> None:
    (tmp_path / "returned").write_bytes(b"\0" * 4096)
    (tmp_path / "results").mkdir()

    qemu.unpack(tmp_path / "returned", tmp_path / "results")

    assert list((tmp_path / "results").iterdir()) == []


_JUNIT = """<testsuites><testsuite><testcase file="e/t.py" name="a"/><testcase file="e/t.py" name="b[x]"><failure message="no"/></testcase>
<testcase file="e/t.py" name="c"><skipped/></testcase><testcase file="e/t.py" name="d"/>
<testcase file="e/t.py" name="d"><error message="teardown"/></testcase></testsuite></testsuites>"""


def test_a_report_is_counted_and_an_error_of_a_teardown_is_a_failure() -> None:
    assert matrix.read_junit(_JUNIT) == Counts(passed=2, skipped=1, failures=("e/t.py::b[x]", "e/t.py::d"))


@pytest.mark.parametrize(
    ("first", "second", "kept", "boots"),
    [
        (Counts(9, 0, ("t::a", "t::b")), Counts(2, 0, ()), Counts(11, 0, ()), 2),
        (Counts(9, 0, ("t::a", "t::b")), Counts(1, 0, ("t::b",)), Counts(10, 0, ("t::b",)), 2),
        # The machine of the second try did not come up: what the first said stands.
        (Counts(9, 0, ("t::a",)), None, Counts(9, 0, ("t::a",)), 2),
        (Counts(9, 0, ("a", "b", "c", "d")), None, Counts(9, 0, ("a", "b", "c", "d")), 1),
        (Counts(11, 0, ()), None, Counts(11, 0, ()), 1),
    ],
)
def test_only_a_few_failures_are_run_again_and_all_of_them_must_pass(
    first: Counts, second: Counts | None, kept: Counts, boots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("bookworm", "6.1")
    asked: list[tuple[str, ...]] = []

    def booted(_cell: Cell, tests: Sequence[str], _timeout_s: float) -> Row:
        asked.append(tuple(tests))
        return Row(cell, {}, first if len(asked) == 1 else second)

    monkeypatch.setattr(matrix, "_run", booted)

    [row] = matrix.run([cell], mark="brief", timeout_s=1, again=True)

    assert row.counts == kept
    assert len(asked) == boots
    assert asked[1:] == [first.failures] * (boots - 1)


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("nftables v1.0.6 (Lester Gooch #5)", "1.0.6"),
        ("bubblewrap 0.8.0", "0.8.0"),
        ("ip utility, iproute2-6.1.0, libbpf 1.1.2", "6.1.0"),
        ("systemd 252 (252.39-1~deb12u2)", "252"),
        ("Python 3.13.5", "3.13.5"),
        ("", ""),
    ],
)
def test_a_version_is_found_in_what_a_program_says(said: str, version: str) -> None:
    assert matrix.short(said) == version


def test_the_page_explains_what_is_not_green_or_says_that_nobody_has() -> None:
    green = Row(Cell("bookworm", "6.1"), {"kernel": "6.1.0-57-cloud-amd64"}, Counts(50, 0, ()))
    red = Row(Cell("bookworm", "5.10"), {}, Counts(48, 0, ("test_known[a]", "test_unknown")))
    absent = Row(Cell("sid", "sid"), {}, None, "not available here: cannot fetch kernel sid", is_absent=True)
    known = [{"kernel": "5.10", "test": "test_known", "text": "5.10 has it not"}, {"host": "trixie", "text": "not of these"}]

    page = matrix.render([green, red, absent], known)

    assert "| bookworm, 6.1 | 6.1.0-57-cloud-amd64 |  |  |  |  |  | 50 | 0 | 0 | ok |" in page
    assert "* bookworm, 5.10: 5.10 has it not" in page
    assert "* bookworm, 5.10: `test_unknown` failed, and nobody has said why." in page
    assert "test_known" not in page
    assert "not available here" in page
    assert "not of these" not in page
    assert (green.is_green, red.is_green, absent.is_green) == (True, False, False)


def test_a_machine_that_is_not_in_the_matrix_is_named() -> None:
    assert matrix.cells_named(["trixie-6.12"]) == [Cell("trixie", "6.12")]
    assert matrix.cells_named([]) == list(MATRIX)
    with pytest.raises(NoMachine, match=r"bookworm-2\.4"):
        matrix.cells_named(["bookworm-2.4"])


def test_what_is_defined_is_defined_of_what_is_there() -> None:
    assert all(cell.host in HOSTS and cell.kernel in KERNELS for cell in (*MATRIX, LANE))
    assert LANE in MATRIX
    assert f"machine={LANE.host}-{LANE.kernel}\n" in (ROOT / "scripts/test").read_text()
    assert all(set(extra.packages_of) <= set(HOSTS) for extra in EXTRAS.values())


def test_a_machines_name_does_not_depend_on_the_order_of_what_it_has() -> None:
    assert Machine("bookworm", "6.1", ("ufw", "docker")).name == Machine("bookworm", "6.1", ("docker", "ufw", "ufw")).name


def test_every_smoke_test_exists() -> None:
    wanted = {name for names in SMOKE.values() for name in names}
    paths = sorted({name.partition("::")[0] for name in wanted})
    command = [sys.executable, "-I", "-m", "pytest", "--collect-only", "-q", "-m", "smoke", *paths]

    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout

    found = {line for line in told.splitlines() if "::" in line}
    assert wanted - found - {name.partition("[")[0] for name in found} == set()


def test_the_machines_part_of_the_job_is_there_and_runs() -> None:
    start = ROOT / "scripts/machines/guest/start"
    assert start.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", start], check=False).returncode == 0
