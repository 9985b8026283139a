// Package tiertest is the suite that every tier passes: Run for the contract,
// Bench for its speed. A tier's test is
//
//	func TestConformance(t *testing.T) {
//		tiertest.Run(t, tiertest.Factory{Open: open, Durable: true})
//	}
//
// Blocks hold internal/content, so that any wrong byte shows. Goroutines that
// a test starts are waited for in that test. Waits are bounded by waitMax; a
// tier that exceeds it fails the test.
package tiertest
