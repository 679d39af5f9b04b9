"""What is kept between starts: `outrider prepare` makes it beforehand, `outrider cache` shows and clears it."""
