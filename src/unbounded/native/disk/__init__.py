"""The disk engine: asynchronous reads and writes of files (io_engine) and of extents in anonymous files (extents).

`DiskEngine` opens named files, `ExtentStore` is the disk tier; both hand out a `DiskHandle` for every transfer.
"""

from unbounded.native.disk.checksum import Checksums, crc32c, crc32c_combine
from unbounded.native.disk.extents import ExtentStore
from unbounded.native.disk.handle import DiskHandle
from unbounded.native.disk.io_engine import DiskEngine, DiskFile
from unbounded.native.disk.striping import Extent

__all__ = ["Checksums", "DiskEngine", "DiskFile", "DiskHandle", "Extent", "ExtentStore", "crc32c", "crc32c_combine"]
