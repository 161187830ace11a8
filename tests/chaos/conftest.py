from tests.processes import fleet
from tests.s3 import s3_server

__all__ = ["fleet", "s3_server"]
