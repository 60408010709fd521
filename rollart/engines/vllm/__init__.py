"""The vLLM backend: a service of ours in front of a vLLM server.

The service speaks the controller's protocol on one side and vLLM's HTTP API on the other. It starts the server from a
Python or a container that has vLLM, or connects to a running one. Placement, supervision and routing see only the
service.
"""
