"""The S3 server, for the tests of every store."""

from tests.s3 import s3_server

__all__ = ["s3_server"]
