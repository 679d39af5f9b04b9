"""What a server did, for Prometheus: measured around the seam, named as vLLM names it where it means the same.

`observed.py` measures, `exported.py` has the names, `grafana.json` is a dashboard of both.
"""
