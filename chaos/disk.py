"""An ext4 of our own in a file, whose power can be cut: what was not synced is gone, as on a real machine.

The shutdown ioctl makes the file system drop everything that its journal and its device do not have. Needs root.
"""

import contextlib
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from chaos.processes import wait_until

_IMAGE_BYTES = 768 << 20  #: sparse
_EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32), linux/fs/ext4/ext4.h
_NO_LOG_FLUSH = 2
_UNMOUNT_TIMEOUT = 15.0


def no_mounts(*tools: str) -> str:
    """Why nothing can be mounted here, with the help of ``tools``; empty when it can."""
    if os.geteuid():
        return "it mounts file systems, which needs root"
    missing = [tool for tool in ("mount", *tools) if shutil.which(tool) is None]
    return f"not here: {', '.join(missing)}" if missing else ""


def no_loop_disk() -> str:
    """Why there can be none here; empty when there can."""
    why = no_mounts("mkfs.ext4", "umount")
    return why or ("" if os.path.exists("/dev/loop-control") else "not here: loop devices")


class LoopDisk:
    """Mounted at ``folder`` from its making to ``close``."""

    def __init__(self, image: Path, folder: Path) -> None:
        self._image, self._folder = image, folder
        with open(image, "wb") as file:
            file.truncate(_IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
        folder.mkdir(exist_ok=True)
        self._mount()

    def cut_power(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, _NO_LOG_FLUSH.to_bytes(4, "little"))
        finally:
            os.close(fd)

    def is_off(self) -> bool:
        """Nothing can be written any more."""
        try:
            fd = os.open(self._folder / ".probe", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
        except OSError:
            return True
        os.close(fd)
        return False

    def power_on(self) -> None:
        """Mount again: the journal is replayed. All processes must be dead."""
        self._unmount()
        self._mount()

    def close(self) -> None:
        """What was on it lies beside the image afterwards: the evidence of a run."""
        with contextlib.suppress(OSError, shutil.Error):
            shutil.copytree(self._folder, self._image.with_suffix(".kept"), ignore=shutil.ignore_patterns("*.sock"))
        self._unmount()

    def _unmount(self) -> None:
        """A process that was just killed may hold its files for a moment longer."""

        def gone() -> bool:
            return subprocess.run(["umount", str(self._folder)], capture_output=True, stdin=subprocess.DEVNULL).returncode == 0

        wait_until(gone, _UNMOUNT_TIMEOUT, f"umount {self._folder}", pause=0.1)

    def _mount(self) -> None:
        _run("mount", "-o", "loop", str(self._image), str(self._folder))
        os.chmod(self._folder, 0o700)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL)
