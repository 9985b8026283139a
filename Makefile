.DEFAULT_GOAL := help
SOAK_FOR ?= 30m
STEPS := build vet format test race invariants lint ucx fuzz

.PHONY: help check golden bench soak object-demo clean $(STEPS)

help:
	@echo 'make check     all that CI runs'
	@echo 'make STEP      one step of it: $(STEPS)'
	@echo 'make golden    write the golden files of tests anew; look at the diff'
	@echo 'make bench     every figure that has a target, in one table; only on a machine that does nothing else'
	@echo 'make soak      half an hour at full speed under faults, then long runs with real processes and every fault of the sweeps: about an hour'
	@echo 'make object-demo  a node above an S3 server of its own, with traffic, until Ctrl-C'
	@echo 'make clean     remove built tools'

check:
	.ci/run

$(STEPS):
	.ci/run $@

golden:
	@for pkg in $$(git grep -lE 'flag.Bool\("rewrite"' -- '*_test.go' | xargs -n1 dirname | sort -u); do \
		go test ./$$pkg -rewrite || exit 1; done

bench:
	@go run -C bench .

soak:
	TERRACE_SOAK=1 go test -count=1 -timeout 60m -v ./test/e2e -run '^TestSoak$$' -soak.for $(SOAK_FOR)
	TERRACE_SOAK=1 go test -count=1 -timeout 60m -v -skip '^TestSoak$$' ./test/e2e ./test/sweep
	TERRACE_SOAK=1 go test -C test/object -count=1 -timeout 60m -v .
	go test -count=1 -timeout 30m ./internal/core -run TestModel -core.long 10m

object-demo:
	@go build -C test/object -o $(CURDIR)/tools/bin/object-demo ./demo
	@exec tools/bin/object-demo

clean:
	rm -rf tools/bin
