"""The disk engine: asynchronous reads and writes of files (engine) and of extents in anonymous files (extents).

`DiskEngine` opens named files, `ExtentStore` is the disk tier; both hand out a `DiskHandle` for every transfer.
"""

from unbounded.native.disk.checksum import Checksums, crc32c, crc32c_combine
from unbounded.native.disk.engine import DiskEngine, DiskFile
from unbounded.native.disk.extents import ExtentStore
from unbounded.native.disk.handle import DiskHandle
from unbounded.native.disk.layout import Extent

__all__ = ["Checksums", "DiskEngine", "DiskFile", "DiskHandle", "Extent", "ExtentStore", "crc32c", "crc32c_combine"]
