"""What routes share: authentication, errors, limits, streams, request bodies."""
