"""Objects in an S3 bucket or a compatible store (``AWS_ENDPOINT_URL`` sets the endpoint)."""

from __future__ import annotations

import base64
import io
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, cast

import boto3
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, FlexibleChecksumError
from s3transfer.exceptions import RetriesExceededError

from agent.messages import Completion, PartGrant, WriteGrant
from control_plane.platform.protocols import ObjectInfo
from core import layout
from core.errors import FtError, IntegrityError, InvalidRequest, Unavailable
from resources.object_store.object_keys import checked_digests, checked_key, missing

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import CopySourceTypeDef

TRANSFER = TransferConfig(multipart_threshold=16 << 20, multipart_chunksize=16 << 20, max_concurrency=4)
"""16 MiB parts, four at once: an upload takes 64 MiB of memory, and S3's limit of 10,000 parts allows 156 GiB."""
READ_BUFFER_BYTES = 1 << 20
GRANTED_S = 3600
"""Seconds for which a signed URL works."""
ENCRYPTION_HEADERS = {
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
}
NOTHING: Mapping[str, Any] = MappingProxyType({})
ABSENT = frozenset({"404", "NoSuchKey", "NotFound"})


class S3ObjectStore:
    """Puts are atomic, as S3 guarantees: an interrupted upload, multipart or not, leaves the old object."""

    def __init__(self, client: S3Client, *, bucket: str, prefix: str = "", cold_class: str = "", kms_key: str = "") -> None:
        self._client = client
        self._cold_class = cold_class
        self._kms_key = kms_key
        self._bucket = bucket
        self._prefix = f"{checked_key(prefix)}/" if prefix else ""

    @classmethod
    def connect(cls, *, bucket: str, prefix: str = "", cold_class: str = "", kms_key: str = "", **options: Any) -> Self:
        """Open a bucket; `options` are those of ``boto3.client``.

        `kms_key`: id, ARN or alias of the KMS key that encrypts a tenant's objects, with ``{tenant}`` for the tenant.
        """
        config = Config(
            retries={"mode": "standard", "max_attempts": 5}, connect_timeout=5, read_timeout=60,
            signature_version="s3v4",  # signs the checksum with a URL, and newer buckets take no other
        )  # fmt: skip
        client = boto3.client("s3", config=config, **options)
        return cls(client, bucket=bucket, prefix=prefix, cold_class=cold_class, kms_key=kms_key)

    def put_bytes(self, key: str, data: bytes) -> None:
        with _translated(key):
            self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data, **self._encryption(key))

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as source:
            self.put_stream(key, source)

    def put_stream(self, key: str, stream: BinaryIO) -> int:
        counted = _Counted(stream)
        with _translated(key):
            self._client.upload_fileobj(
                cast(BinaryIO, counted), self._bucket, self._key(key), ExtraArgs=self._encryption(key), Config=TRANSFER
            )
        return counted.num_bytes

    def get_bytes(self, key: str) -> bytes:
        with self.open(key) as source, _translated(key):
            return source.read()

    def open(self, key: str) -> BinaryIO:
        with _translated(key):
            body = self._client.get_object(Bucket=self._bucket, Key=self._key(key))["Body"]
        return cast(BinaryIO, io.BufferedReader(_Body(cast(io.RawIOBase, body), key), READ_BUFFER_BYTES))

    def get_file(self, key: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            with _translated(key):
                self._client.download_file(self._bucket, self._key(key), str(beside), Config=TRANSFER)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def exists(self, key: str) -> bool:
        try:
            with _translated(key):
                self._client.head_object(Bucket=self._bucket, Key=self._key(key))
        except FtError as error:
            if error.code == "object_not_found":
                return False
            raise
        return True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for info, _ in self._listed(prefix):
            yield info

    def cool(self, prefix: str) -> int | None:
        """Copy each object onto itself, on the server, with the cold storage class."""
        if not self._cold_class:
            return None
        found = list(self._listed(prefix))
        for info, storage_class in found:
            if storage_class == self._cold_class:
                continue
            here = {"Bucket": self._bucket, "Key": self._key(info.key)}
            extra = {"StorageClass": self._cold_class, "MetadataDirective": "COPY", **self._encryption(info.key)}
            with _translated(info.key):
                self._client.copy(cast("CopySourceTypeDef", here), self._bucket, self._key(info.key), ExtraArgs=extra, Config=TRANSFER)
        return len(found)

    def _listed(self, prefix: str) -> Iterator[tuple[ObjectInfo, str]]:
        """Yield objects with their storage classes."""
        under = self._prefix + (f"{checked_key(prefix)}/" if prefix else "")
        with _translated(prefix):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=under):
                for item in page.get("Contents", ()):
                    info = ObjectInfo(key=item["Key"].removeprefix(self._prefix), size_bytes=item["Size"])
                    yield info, item.get("StorageClass", "STANDARD")

    def delete(self, key: str) -> None:
        with _translated(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def renew_keys(self, tenant: str) -> None:
        """Does nothing: a bucket's keys are in a KMS, and the operator's."""

    def destroy_old_keys(self, tenant: str) -> int:  # noqa: ARG002
        return 0

    def uri(self, key: str) -> str:
        return f"s3://{self._bucket}/{self._key(key)}"

    def read_url(self, key: str) -> str:
        with _translated(key):
            self._client.head_object(Bucket=self._bucket, Key=self._key(key))
            return self._signed("get_object", Key=self._key(key))

    def begin_upload(self, key: str, part_sha256: Sequence[str], upload_id: str | None = None) -> WriteGrant:
        sums = [base64.b64encode(bytes.fromhex(digest)).decode() for digest in checked_digests(part_sha256)]
        target = {"Key": self._key(key)}
        if len(sums) == 1:
            return WriteGrant(parts=(self._grant("put_object", sums[0], target, self._encryption(key)),))
        begun = upload_id or self._create_upload(key)
        parts = [
            self._grant("upload_part", digest, {**target, "UploadId": begun, "PartNumber": number})
            for number, digest in enumerate(sums, start=1)
        ]
        return WriteGrant(parts=tuple(parts), upload_id=begun)

    def _create_upload(self, key: str) -> str:
        with _translated(key):
            self._abort_uploads(self._key(key))
            made = self._client.create_multipart_upload(
                Bucket=self._bucket, ChecksumAlgorithm="SHA256", Key=self._key(key), **self._encryption(key)
            )
            return made["UploadId"]

    def _abort_uploads(self, key: str) -> None:
        """Abort earlier uploads of the object that were never completed: their parts are stored, and no listing shows them."""
        for upload in self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=key).get("Uploads", ()):
            if upload["Key"] == key:
                self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload["UploadId"])

    def complete_upload(self, completion: Completion) -> None:
        digests = checked_digests(completion.part_sha256)
        if len(completion.etags) != len(digests):
            raise InvalidRequest(f"{len(completion.etags)} etags for {len(digests)} parts; send one of each", param="etags")
        parts = [
            {"PartNumber": number, "ETag": etag, "ChecksumSHA256": base64.b64encode(bytes.fromhex(digest)).decode()}
            for number, (etag, digest) in enumerate(zip(completion.etags, digests, strict=True), start=1)
        ]
        with _translated(completion.key):
            self._client.complete_multipart_upload(
                Bucket=self._bucket,
                Key=self._key(completion.key),
                UploadId=completion.upload_id,
                MultipartUpload={"Parts": parts},  # type: ignore[typeddict-item]
            )

    def _grant(self, operation: str, checksum: str, target: Mapping[str, Any], encryption: Mapping[str, Any] = NOTHING) -> PartGrant:
        """Sign a request that carries its checksum, which the store compares with the bytes that arrive."""
        url = self._signed(operation, ChecksumSHA256=checksum, **target, **encryption)
        return PartGrant(url=url, headers={"x-amz-checksum-sha256": checksum} | {ENCRYPTION_HEADERS[k]: v for k, v in encryption.items()})

    def _encryption(self, key: str) -> dict[str, Any]:
        """Return the arguments that encrypt an object with its tenant's key. Objects of no tenant are encrypted as the bucket says."""
        tenant = layout.tenant_of(key)
        if tenant is None or not self._kms_key:
            return {}
        return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": self._kms_key.replace("{tenant}", tenant)}

    def _signed(self, operation: str, **parameters: Any) -> str:
        url: str = self._client.generate_presigned_url(operation, Params={"Bucket": self._bucket, **parameters}, ExpiresIn=GRANTED_S)
        return url

    def _key(self, key: str) -> str:
        return self._prefix + checked_key(key)


class _Body(io.RawIOBase):
    """The bytes of an object as they arrive; a broken connection raises ``Unavailable`` instead of ending the stream."""

    def __init__(self, body: io.RawIOBase, key: str) -> None:
        self._body, self._key = body, key

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int | None:
        with _translated(self._key):
            return self._body.readinto(buffer)

    def close(self) -> None:
        self._body.close()
        super().close()


class _Counted:
    """A readable stream that counts bytes. Not seekable, so that the uploader reads it once and does not close the caller's file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.num_bytes = 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.num_bytes += len(data)
        return data


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Translate boto3's exceptions to ``NotFound``, ``IntegrityError`` or ``Unavailable``."""
    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        if code in ABSENT:
            raise missing(key) from error
        said = error.response.get("Error", {}).get("Message", "") if "kms" in str(error).lower() else ""
        message = f"the object store refused {error.operation_name} of {key!r}: {code}" + (f" ({said})" if said else "")
        raise Unavailable(message, code="object_store_unavailable") from error
    except FlexibleChecksumError as error:
        raise IntegrityError(f"object {key!r} does not match its checksum; restore it from a backup") from error
    except (BotoCoreError, Boto3Error, RetriesExceededError) as error:
        message = f"the object store did not answer for {key!r} ({type(error).__name__}); retry later"
        raise Unavailable(message, code="object_store_unavailable") from error
