"""What the environments of vendors' engines consist of, one file a vendor."""
