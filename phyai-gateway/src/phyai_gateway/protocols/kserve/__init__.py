"""KServe v2 (Open Inference Protocol) over HTTP, with the binary tensor extension."""
