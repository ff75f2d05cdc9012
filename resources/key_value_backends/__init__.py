"""The stores that key-value tables lie in: SQLite, PostgreSQL, DynamoDB, and a lake's objects."""

from dagster_adjunct.resources.key_value.segment import register_segment_backend
from dagster_adjunct.resources.key_value_backends.dynamodb import DynamoDbSegments
from dagster_adjunct.resources.key_value_backends.objects.segment import ObjectSegments
from dagster_adjunct.resources.key_value_backends.postgres import PostgresSegments
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments

register_segment_backend("dynamodb", DynamoDbSegments)
register_segment_backend("objects", ObjectSegments)
register_segment_backend("postgres", PostgresSegments)
register_segment_backend("sqlite", SqliteSegments)

__all__ = ["DynamoDbSegments", "ObjectSegments", "PostgresSegments", "SqliteSegments"]
