"""What the agent reports of its work to Prometheus and OpenTelemetry."""
