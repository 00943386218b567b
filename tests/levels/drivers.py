"""Small fsspec drivers that do what real ones do, kept in dictionaries: each can less than ``memory://``."""

import datetime
from typing import ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class ObjectStore(AbstractFileSystem):
    """As gs:// and az://: an object shows when its file is closed; ``mode="create"`` is refused by the server."""

    protocol = "objects"
    cachable = False
    objects: ClassVar[dict[str, tuple[bytes, datetime.datetime]]] = {}
    discarded: ClassVar[list[str]] = []
    clock_s = 0.0
    """How much the server's clock is ahead of ours."""

    def __init__(self, password=None, **options):
        if options.keys() - {"skip_instance_cache"}:
            raise TypeError(f"unknown options {options}, password {password}")
        super().__init__()
        self.password = password

    @classmethod
    def _keep(cls, path, data):
        now = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=cls.clock_s)
        cls.objects[path] = bytes(data), now

    def _open(self, path, mode="rb", block_size=None, **options):
        return ObjectFile(self, path, mode, block_size or 5 << 20)

    def pipe_file(self, path, value, mode="overwrite", **options):
        path = self._strip_protocol(path)
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        self._keep(path, value)

    def cat_file(self, path, start=None, end=None, **options):
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][0][start:end]

    def rm_file(self, path):
        if self.objects.pop(self._strip_protocol(path), None) is None:
            raise FileNotFoundError(path)

    def modified(self, path):
        return self.objects[self._strip_protocol(path)][1]

    def info(self, path, **options):
        path = self._strip_protocol(path)
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path][0]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path, detail=True, **options):
        path = self._strip_protocol(path)
        names = {
            f"{path}/{name[len(path) + 1 :].split('/')[0]}" for name in self.objects if name.startswith(f"{path}/")
        }
        if not names:
            raise FileNotFoundError(path)
        return [self.info(name) for name in names] if detail else sorted(names)


class ObjectFile(AbstractBufferedFile):
    def _initiate_upload(self):
        self.sent = b""

    def _upload_chunk(self, final=False):
        self.buffer.seek(0)
        self.sent += self.buffer.read()
        if final:
            self.fs._keep(self.path, self.sent)
        return True

    def discard(self):
        self.fs.discarded.append(self.path)


class NoCreate(ObjectStore):
    """Takes no ``mode``."""

    protocol = "nocreate"

    def pipe_file(self, path, value):
        super().pipe_file(path, value)


class IgnoresCreate(ObjectStore):
    """Takes any ``mode``, and overwrites."""

    protocol = "ignorescreate"

    def pipe_file(self, path, value, **options):
        super().pipe_file(path, value)


class LosesBytes(ObjectStore):
    """Says that it wrote what it did not."""

    protocol = "losesbytes"

    @classmethod
    def _keep(cls, path, data):
        super()._keep(path, data[:-1] if "safetensors" in path and "claim" not in path else data)


class NoTimes(ObjectStore):
    protocol = "notimes"

    def modified(self, path):
        raise NotImplementedError


class Talkative(ObjectStore):
    """Quotes its password in what it raises."""

    protocol = "talkative"
    is_broken = False

    def pipe_file(self, path, value, **options):
        if self.is_broken:
            try:
                raise RuntimeError(f"login with {self.password} failed")
            except RuntimeError as error:
                raise ValueError("cannot write") from error
        super().pipe_file(path, value, **options)

    def ls(self, path, detail=True, **options):
        raise PermissionError(13, f"password {self.password} is not accepted")


class LooksFirst(MemoryFileSystem):
    """As sftp://: ``mode="create"`` looks first and puts then; an open file shows."""

    protocol = "looksfirst"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    pipe_file = AbstractFileSystem.pipe_file


class LosesSight(MemoryFileSystem):
    """Its server does not answer when it is asked about a manifest. ``exists`` of fsspec says that there is none."""

    protocol = "losessight"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    def info(self, path, **options):
        if path.endswith(".json"):
            raise TimeoutError("no answer")
        return super().info(path, **options)


class Keeps(MemoryFileSystem):
    """As smb://: a file is not renamed to a name that exists."""

    protocol = "keeps"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    def mv(self, path1, path2, **options):
        if self.exists(path2):
            raise OSError(17, "File exists")
        super().mv(path1, path2, **options)


class KeepsInSilence(Keeps):
    """As webhdfs://, which does not say so."""

    protocol = "keepsinsilence"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    def mv(self, path1, path2, **options):
        if not self.exists(path2):
            super().mv(path1, path2, **options)


class LosesSize(ObjectStore):
    """Does not answer when it is asked about a file that has just arrived."""

    protocol = "losessize"

    def info(self, path, **options):
        facts = super().info(path, **options)
        if path.endswith(".safetensors"):
            raise TimeoutError("no answer")
        return facts


DRIVERS = (
    ObjectStore,
    NoCreate,
    IgnoresCreate,
    LosesBytes,
    NoTimes,
    Talkative,
    LooksFirst,
    LosesSight,
    Keeps,
    KeepsInSilence,
    LosesSize,
)
for driver in DRIVERS:
    fsspec.register_implementation(driver.protocol, driver, clobber=True)
