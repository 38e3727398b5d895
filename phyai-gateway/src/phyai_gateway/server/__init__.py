"""The model server: one engine behind gRPC and any other protocol. Importing it loads nothing."""
