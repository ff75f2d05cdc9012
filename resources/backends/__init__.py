"""Table functions for real stores. A store's driver is imported when a connection is opened."""

from dagster_adjunct.resources.backends.columns import describe_function, function_from_description, register_backend
from dagster_adjunct.resources.backends.dynamodb import DynamoDbTable
from dagster_adjunct.resources.backends.http import HttpExtra, HttpTable
from dagster_adjunct.resources.backends.memory import MemoryTable
from dagster_adjunct.resources.backends.postgres import PostgresTable
from dagster_adjunct.resources.backends.redis import RedisTable
from dagster_adjunct.resources.backends.sqlite import SqliteTable

register_backend("dynamodb", DynamoDbTable)
register_backend("http", HttpTable)
register_backend("memory", MemoryTable)
register_backend("postgres", PostgresTable)
register_backend("redis", RedisTable)
register_backend("sqlite", SqliteTable)

__all__ = [
    "DynamoDbTable",
    "HttpExtra",
    "HttpTable",
    "PostgresTable",
    "RedisTable",
    "SqliteTable",
    "describe_function",
    "function_from_description",
    "register_backend",
]
