"""What the agent answers by gRPC. A servicer looks up, delegates and answers; it decides nothing."""
