"""The stores that key-value tables lie in: SQLite, PostgreSQL, DynamoDB, and a lake's objects."""

from dagster_adjunct.resources.key_value.backend_names import register_segment_backend
from dagster_adjunct.resources.key_value_backends.dynamodb_segments import DynamoDbSegments
from dagster_adjunct.resources.key_value_backends.object_segments import ObjectSegments
from dagster_adjunct.resources.key_value_backends.postgres_segments import PostgresSegments
from dagster_adjunct.resources.key_value_backends.sqlite_segments import SqliteSegments

register_segment_backend("dynamodb", DynamoDbSegments)
register_segment_backend("objects", ObjectSegments)
register_segment_backend("postgres", PostgresSegments)
register_segment_backend("sqlite", SqliteSegments)

__all__ = ["DynamoDbSegments", "ObjectSegments", "PostgresSegments", "SqliteSegments"]
