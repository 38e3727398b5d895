"""RLinf's msgpack over HTTP: ``POST /v1/actions/generations``, flat and envelope form."""
