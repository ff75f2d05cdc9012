"""Creates the bucket of ADJUNCT_LAKE on an S3 server of your own: `python -m orders.bucket`.

On AWS, create it with your other infrastructure: the policies in iam/ do not allow anybody to do
it.
"""

import os
from urllib.parse import urlsplit

import boto3

if __name__ == "__main__":
    bucket = urlsplit(os.environ["ADJUNCT_LAKE"]).netloc
    client = boto3.client("s3", endpoint_url=os.environ["ADJUNCT_S3_ENDPOINT"])
    if bucket not in [known["Name"] for known in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=bucket)
    print(f"bucket {bucket}: ready")
