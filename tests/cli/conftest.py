"""A real S3 server, for those who ask for one."""

from tests.s3 import s3_server

__all__ = ["s3_server"]
