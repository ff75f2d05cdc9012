"""Parcels: scans from Kafka, changes of a PostgreSQL table, depots in files, and a DynamoDB
table as the result.
"""
