package main

import (
	"context"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
)

type pulling struct{ rocketmq.PullConsumer }

func startPull(s *session, a consumeArguments) (any, error) {
	made, err := rocketmq.NewPullConsumer(
		consumer.WithNameServer(s.nameServers),
		consumer.WithInstance(a.Name),
		consumer.WithGroupName(a.Group),
		consumer.WithConsumeFromWhere(beginnings[a.From]),
		consumer.WithPullBatchSize(32),
	)
	if err != nil {
		return nil, err
	}
	if err := made.Subscribe(a.Topic, a.selector()); err != nil {
		return nil, err
	}
	s.clients[a.Name] = pulling{made}
	return nil, made.Start()
}

// pulled is the answer to a pull. Served counts the messages that the broker sent, before the
// client's own look at their tags.
type pulled struct {
	Status   int        `json:"status"`
	Next     int64      `json:"next"`
	Min      int64      `json:"min"`
	Max      int64      `json:"max"`
	Served   int        `json:"served"`
	Messages []received `json:"messages"`
}

// pull reads from one place.
func pull(s *session, a struct {
	Name, Topic, Broker string
	Queue, Count        int
	Offset              int64
}) (any, error) {
	by, err := find[pulling](s, a.Name)
	if err != nil {
		return nil, err
	}
	queue := &primitive.MessageQueue{Topic: a.Topic, BrokerName: a.Broker, QueueId: a.Queue}
	result, err := by.PullFrom(context.Background(), queue, a.Offset, a.Count)
	if err != nil {
		return nil, err
	}
	answer := pulled{
		Status:   int(result.Status),
		Next:     result.NextBeginOffset,
		Min:      result.MinOffset,
		Max:      result.MaxOffset,
		Served:   len(primitive.DecodeMessage(result.GetBody())),
		Messages: []received{},
	}
	for _, message := range result.GetMessageExts() {
		answer.Messages = append(answer.Messages, describe(message))
	}
	return answer, nil
}

// poll takes what the pull consumer fetches by itself, and acknowledges it, until it has `Count`
// messages or the time is up.
func poll(s *session, a struct {
	Name   string
	Count  int
	WaitMs int `json:"wait_ms"`
}) (any, error) {
	by, err := find[pulling](s, a.Name)
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(time.Duration(a.WaitMs) * time.Millisecond)
	messages := []received{}
	for len(messages) < a.Count && time.Now().Before(deadline) {
		request, err := by.Poll(context.Background(), time.Until(deadline))
		if consumer.IsNoNewMsgError(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, message := range request.GetMsgList() {
			messages = append(messages, describe(message))
		}
		by.ACK(context.Background(), request, consumer.ConsumeSuccess)
	}
	return messages, nil
}
