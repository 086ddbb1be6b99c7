"""What a plan holds ready and how it changes: standbys, takeover, promotion, stragglers."""
