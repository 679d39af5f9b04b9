"""The same models as OpenVINO graphs on the CPU."""
