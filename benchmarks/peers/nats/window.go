package main

import (
	"fmt"
	"math/bits"
	"sync/atomic"
	"time"
)

const halfBits = 7

// histogram counts durations. Each power of two of nanoseconds has 128 buckets; a percentile is the
// upper bound of its bucket, at most 0.8 % above the exact value.
type histogram struct {
	counts [64 << halfBits]atomic.Int64
	total  atomic.Int64
	max    atomic.Int64
}

func (h *histogram) add(took time.Duration) {
	value := uint64(max(took, 0))
	shift := max(bits.Len64(value)-halfBits-1, 0)
	h.counts[shift<<halfBits+int(value>>shift)].Add(1)
	h.total.Add(1)
	for {
		before := h.max.Load()
		if int64(value) <= before || h.max.CompareAndSwap(before, int64(value)) {
			return
		}
	}
}

// percentile is in microseconds; 0 without values.
func (h *histogram) percentile(percent float64) int64 {
	rank := max(int64(float64(h.total.Load())*percent/100+0.999999), 1)
	seen := int64(0)
	for bucket := range h.counts {
		seen += h.counts[bucket].Load()
		if seen >= rank {
			shift := max(bucket>>halfBits-1, 0)
			bound := int64(bucket-shift<<halfBits+1)<<shift - 1
			return min(bound, h.max.Load()) / 1000
		}
	}
	return 0
}

// A window is the time in which a load is measured, after it has warmed up. It prints "begin" and
// "end" at its bounds, so that the runner reads the CPU time of the processes there, and JSON.
type window struct {
	begin, end time.Time
	latencies  histogram
	messages   atomic.Int64
	failed     atomic.Int64
}

func newWindow(warm, seconds time.Duration) *window {
	begin := time.Now().Add(warm)
	return &window{begin: begin, end: begin.Add(seconds)}
}

func (w *window) open() bool {
	return time.Now().Before(w.end)
}

func (w *window) contains(when time.Time) bool {
	return !when.Before(w.begin) && when.Before(w.end)
}

// acknowledged counts a message that was acknowledged now.
func (w *window) acknowledged(began time.Time) {
	now := time.Now()
	if w.contains(now) {
		w.messages.Add(1)
		w.latencies.add(now.Sub(began))
	}
}

// arrived counts a message that arrived now and should have been sent at the time intended.
func (w *window) arrived(intended time.Time) {
	if w.contains(intended) {
		w.messages.Add(1)
		w.latencies.add(time.Since(intended))
	}
}

func (w *window) announce() {
	time.Sleep(time.Until(w.begin))
	fmt.Println("begin")
	time.Sleep(time.Until(w.end))
	fmt.Println("end")
}

func (w *window) report() {
	h := &w.latencies
	fmt.Printf(
		`{"messages":%d,"failed":%d,"seconds":%.3f,"p50_us":%d,"p90_us":%d,"p99_us":%d,`+
			`"p999_us":%d,"max_us":%d}`+"\n",
		w.messages.Load(), w.failed.Load(), w.end.Sub(w.begin).Seconds(), h.percentile(50),
		h.percentile(90), h.percentile(99), h.percentile(99.9), h.max.Load()/1000)
}
