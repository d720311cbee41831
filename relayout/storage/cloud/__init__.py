"""Object stores: S3, GCS, Azure."""
